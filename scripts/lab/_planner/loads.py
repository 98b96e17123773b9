# SPDX-License-Identifier: Apache-2.0
"""Loads that shift between much prefill and much decode."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy

BIN_S = 5.0
HOUR_S = 3600.0
Mix = tuple[float, float, float]  # requests a second, prompt tokens, answer tokens
PREFILL: Mix = (4.0, 12_000.0, 170.0)  # 4.8 engines of prefill, 1.7 of decode
DECODE: Mix = (4.0, 4_000.0, 480.0)  # 1.6 and 4.8
ALTERNATING_S = (30, 60, 90, 120, 180, 240, 300, 600, 1800, 3600)


def _between(share: float) -> Mix:
    """PREFILL at 0, DECODE at 1."""
    return tuple(one + (two - one) * share for one, two in zip(PREFILL, DECODE, strict=True))


def _day(at_s: float) -> Mix:
    """A day in two hours: few requests at night, prompts long in the morning, answers long in the evening."""
    turn = 2 * math.pi * at_s / (2 * HOUR_S)
    rate, prompt, answer = _between(0.5 - 0.5 * math.sin(turn))
    return rate * (0.65 - 0.35 * math.cos(turn)), prompt, answer


def _bursts(at_s: float) -> Mix:
    """Every ten minutes or so 40 s of long prompts, at times that look random."""
    number = int(at_s // 600)
    start_s = 600 * number + (number * 7919 % 37) / 37 * 500
    return (PREFILL[0], 10_000.0, 170.0) if start_s <= at_s < start_s + 40 else (3.0, 5000.0, 480.0)


def loads() -> dict[str, tuple[float, Callable[[float], Mix]]]:
    """By name: how long, and the mix at each second."""
    found: dict[str, tuple[float, Callable[[float], Mix]]] = {
        "constant": (2 * HOUR_S, lambda at_s: PREFILL),
        "step": (2 * HOUR_S, lambda at_s: PREFILL if at_s < HOUR_S else DECODE),
        "ramp": (2 * HOUR_S, lambda at_s: _between(at_s / (2 * HOUR_S))),
        "day": (4 * HOUR_S, _day),
        "bursts": (2 * HOUR_S, _bursts),
    }
    for phase_s in ALTERNATING_S:
        hours = 4 if phase_s >= 1800 else 2
        found[f"alternating {phase_s} s"] = (hours * HOUR_S, lambda at_s, phase_s=phase_s:
                                            (PREFILL, DECODE)[int(at_s // phase_s) % 2])
        if phase_s in (60, 180, 600):
            found[f"mild {phase_s} s"] = (2 * HOUR_S, lambda at_s, phase_s=phase_s:
                                         _between(0.3 + 0.4 * (int(at_s // phase_s) % 2)))
    return found


def draw(seconds: float, mix: Callable[[float], Mix], seed: int) -> numpy.ndarray:
    """Arrivals by a Poisson process, lengths lognormal: rows (time, prompt tokens, answer tokens) in order."""
    random = numpy.random.default_rng(seed)
    found = []
    for number in range(int(seconds // BIN_S)):
        rate, prompt, answer = mix(number * BIN_S)
        count = random.poisson(rate * BIN_S)
        times = numpy.sort(random.random(count)) * BIN_S + number * BIN_S
        prompts, answers = _lengths(random, prompt, 0.4, count), _lengths(random, answer, 0.5, count)
        found.append(numpy.stack([times, prompts, answers], 1))
    return numpy.concatenate(found)


def _lengths(random: numpy.random.Generator, mean: float, sigma: float, count: int) -> numpy.ndarray:
    return numpy.maximum(1, numpy.round(random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)))
