"""Starts a gateway: `python -m paceline.gateway --model FOLDER`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig, model_folders
from paceline.gateway.doors import Addresses
from paceline.gateway.fleet.generation_config import model_defaults
from paceline.gateway.service import serve
from paceline.gateway.text.codec import TextCodec
from paceline.obs.log import setup_logging
from paceline.service.config import exit_with_error, loggable, named, parse
from paceline.service.process import GARBAGE_OF_REQUESTS, install_signal_handlers, run, settle_heap
from paceline.store.base import require
from paceline.store.redis import open_store

logger = logging.getLogger(__name__)

PROG = "paceline gateway"
# Python's own 5 ms is what each busy thread may cost the event loop every time it wakes up.
SWITCH_S = 0.001


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(GatewayConfig, arguments, os.environ, PROG, "The front door: OpenAI HTTP and gRPC.")
    setup_logging("gateway")
    try:
        folders = model_folders(config.model, config.model_name)
    except ConfigError as error:
        exit_with_error(PROG, error)
    run(serve_until_signal(config, folders), prog=PROG)


async def serve_until_signal(config: GatewayConfig, folders: Mapping[str, Path]) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: A folder holds no tokenizer or a broken generation_config.json, a port is in use, or the store
            cannot be reached.
    """
    logger.info("starting", extra=loggable(config))
    sys.setswitchinterval(SWITCH_S)
    stop = asyncio.Event()
    install_signal_handlers(stop)
    codecs, defaults = {}, {}
    for name, folder in folders.items():
        with named("--chat-template", config.chat_template) if config.chat_template else named("--model", folder):
            codecs[name] = TextCodec.from_folder(folder, config.chat_template)
        with named("--generation-config", config.generation_config):
            defaults[name] = model_defaults(config.generation_config, folder)
    settle_heap(GARBAGE_OF_REQUESTS)
    async with open_store(config.redis_url) as store:
        await require(store)
        await serve(config, store, codecs, stop, _log_ready, defaults)


def _log_ready(addresses: Addresses) -> None:
    logger.info("gateway is ready", extra={"http": addresses.http, "grpc": addresses.grpc})


if __name__ == "__main__":
    main()
