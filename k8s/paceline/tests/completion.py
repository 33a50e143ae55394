"""What `helm test` runs in a pod: one completion through the gateway, and what speculation did for it.

It needs Python alone. From the environment it takes URL, MODEL, and API_KEY where the gateway asks for keys.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TOKENS = 16
TIMEOUT_S = 120


def main() -> None:
    """Ends with status 0 if the answer has its tokens and its record, and with a line that says why if not."""
    body = {"model": os.environ["MODEL"], "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("API_KEY", "")}
    url = os.environ["URL"] + "/v1/completions"
    # The certificate of the door names what clients call it, which is not the Service.
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusting) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} answers {error.code}: {error.read(500).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{url} cannot be reached: {error}")
    record = (answer.get("metrics") or {}).get("speculative_decoding")
    tokens = answer["usage"]["completion_tokens"]
    if tokens != TOKENS:
        sys.exit(f"{TOKENS} tokens were asked for, {tokens} came")
    if not record or not 1 <= record["num_steps"] <= tokens:
        sys.exit(f"the answer's record of speculation is {record}")
    drafted, accepted = record["num_draft_tokens"], record["num_accepted_draft_tokens"]
    sys.stdout.write(f"{tokens} tokens in {record['num_steps']} steps, {accepted} of {drafted} draft tokens accepted\n")


main()
