"""The drafter tier as whoever verifies reaches it: which drafters there are, and the streams to them."""
