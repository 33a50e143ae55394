"""Runs a bench by name: `python -m loadtest concurrency --help`, or `make bench NAME=concurrency`."""

from __future__ import annotations

import importlib
import os
import sys

BENCHES = {
    "chaos": "kills, freezes, drains and cuts off services while streams run, and compares every token",
    "cold": "the first load of a fresh fleet, with the drafter tier and without it",
    "concurrency": "speculative against plain decoding at 1 to 64 streams, with one configuration",
    "core": "bookkeeping of verifier and drafter beside their models, by part, at 1 to 256 sessions",
    "controller": "the controller on twenty random devices beside each fixed gamma",
    "disruption": "kills and a rolling restart under 64 streams on simulated devices: tokens/s, pauses, whole texts",
    "engines": "vLLM plain, with its own draft model and with the drafter tier, at 1 to 32 streams",
    "failover": "pauses when a verifier or a drafter dies, or an engine hangs",
    "fuzz": "100,000 bad messages to every door: right answers, no growth, no restart, the same text after",
    "gpu": "kernels, steps, engines and a fleet of 8B- and 1B-shaped random models on a GPU; `make gpu-contact`",
    "literature": "the table of the literature at its constants, by the real fleet on simulated devices",
    "load": "replays a trace of arrivals, open loop, with speculation off, on and adaptive; `make load`",
    "locust": "users of both doors come in ramps and spikes, by Locust",
    "long_prompt": "a prompt of 8,000 tokens beside streams, on a model in the shape of Llama-3.2-1B",
    "methods": "every way to draft on code, prose and tables, and a drafter with random weights",
    "overload": "goodput at three times what the fleet can do",
    "peers": "the fleet beside other engines on the same pair, each in an environment of its own",
    "product": "the matrix products of a CPU step beside torch's, by each set of instructions of this machine",
    "scale": "the real fleet on simulated devices, with one or several verifiers at a drafter, beside the planner",
    "tenants": "a modest tenant's p99 and errors beside a greedy one, in seven ways, by turns",
    "turns": "two source trees, or settings, by turns: speed, steps and texts of each against the first",
    "vllm": "vLLM's load client, unmodified, against the fleet: it reads our acceptance from /metrics",
}


def main() -> None:
    """Hands over to the bench named first on the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        sys.stderr.write("usage: python -m loadtest NAME [options]\n\n")
        for known, what in BENCHES.items():
            sys.stderr.write(f"  {known:12} {what}\n")
        raise SystemExit(2)
    del sys.argv[1]
    # Every fleet of a bench begins as a new one: what another has learned would decide what is measured.
    os.environ["PACELINE_LEARNED_DIR"] = "none"
    # A fleet that waits for its turn would take the time of the one that is measured.
    os.environ.setdefault("PACELINE_REHEARSE", "off")
    raise SystemExit(importlib.import_module(f"loadtest.{name}").main())


if __name__ == "__main__":
    main()
