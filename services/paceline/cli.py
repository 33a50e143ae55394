"""The `paceline` command; each subcommand imports what it needs when it is called, so that help is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import paceline
from paceline.core.errors import ConfigError
from paceline.service.config import as_called, exit_with_error, suggestion

PROG = "paceline"
EXTRA_OF_COMMAND = {
    "gateway": "gateway",
    "verifier": "engine",
    "drafter": "engine",
    "models": "engine",
    "up": "serve",
    "demo": "serve",
    "plan": "plan",
    "rehearse": "vllm",
    "completion": "fleet",
}
EXTRA_OF_PACKAGE = {"ray": "ray", "opentelemetry": "otel"}

COMMANDS = {
    "up": "start a whole fleet on this machine",
    "gateway": "run the front door: OpenAI HTTP and gRPC",
    "verifier": "run a target model",
    "drafter": "run a draft model",
    "drain": "move sessions off a replica before it is stopped",
    "generate": "stream a completion from a running fleet",
    "demo": "stream completions with and without speculation, and compare them",
    "rehearse": "show the drafter tier under vLLM what drafting is worth, before users ask",
    "plan": "say what models promise on their GPUs, or how many of these a load needs",
    "models": "models fetch NAME fetches a checkpoint",
    "dev-ca": "make certificates to try mutual TLS with",
    "key": "make an API key for a gateway",
    "completion": "print completions of this command for a shell",
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"{PROG} {paceline.__version__}\n")
        return
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        help_ = suggestion(command, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        exit_with_error(PROG, ConfigError(f"no command {command!r}{help_}"))
    try:
        _action(command)(rest)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "paceline":
            raise
        extra = EXTRA_OF_PACKAGE.get(error.name.partition(".")[0]) or EXTRA_OF_COMMAND.get(command, "dev")
        message = f"needs the package {error.name}: install paceline[{extra}]"
        exit_with_error(f"{PROG} {command}", ConfigError(message))
    except ConfigError as error:
        exit_with_error(f"{PROG} {command}", error)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {as_called(PROG)} COMMAND [OPTIONS]",
            "",
            "Serves language models with speculative decoding whose drafter is a tier of its own.",
            "",
            *lines,
            "",
            f"{as_called(PROG)} COMMAND --help shows its options; {as_called(PROG)} --version the version.",
            "",
        ]
    )


def _action(command: str) -> Callable[[Sequence[str]], None]:
    modules = {
        "up": "paceline.cluster.up",
        "demo": "paceline.cluster.demo",
        "drain": "paceline.cluster.drain",
        "models": "paceline.cluster.models",
        "generate": "paceline.client.generate",
        "rehearse": "paceline.client.rehearse",
        "plan": "paceline.planning.__main__",
        "dev-ca": "paceline.service.dev_ca",
        "key": "paceline.gateway.access.keys",
        "completion": "paceline.completion",
    }
    module = importlib.import_module(modules.get(command, f"paceline.{command}.__main__"))
    action: Callable[[Sequence[str]], None] = module.main
    return action


if __name__ == "__main__":
    main()
