"""The drafter tier from a verifier's side: which drafters there are, and the streams to them."""
