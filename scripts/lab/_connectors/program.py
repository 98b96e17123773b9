# SPDX-License-Identifier: Apache-2.0
"""How a program of scripts/lab begins that starts engines of V1."""
import argparse

from vllm_pd.bench.servers import exit_on_signals
from vllm_pd.model.installation import World, find_installation


def begin(parser: argparse.ArgumentParser, model: str | None) -> None:
    """Ends the program, with the cure, where it has no model or not engine V1. From then on signals end it in order."""
    if not model:
        parser.error("there is no model: enter the environment (. scripts/env.sh) or write --model")
    if find_installation().world is not World.PLUGIN:
        parser.error("this needs engine V1: VLLM_PD_ENGINE=v1; export VLLM_PD_ENGINE; . scripts/env.sh")
    exit_on_signals()
