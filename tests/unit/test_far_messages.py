# SPDX-License-Identifier: Apache-2.0
"""What hosts say to each other about blocks: there and back, within its bounds, and nothing else."""
import contextlib
import random

import msgspec
import pytest

from vllm_pd.rpc.codec import BadFrame
from vllm_pd.store.beyond.messages import (
    MAX_AGENT_BYTES,
    MAX_BYTES,
    MAX_MODELS,
    MAX_NAMES,
    MAX_PARTS,
    FindBlocks,
    FoundBlocks,
    SendBlocks,
    SentBlocks,
    questions,
    replies,
)

MODEL, NAME = b"m" * 16, b"n" * 32
FIND = FindBlocks(7, 4096, (MODEL, ), (NAME, ) * 3)
SEND = SendBlocks(8, 4096, (MODEL, ), (NAME, ), ((1 << 64) - 1, ), "store-1", b"metadata", 1 << 47)
FOUND, SENT = FoundBlocks(7, 3), SentBlocks(8, ((1 << 64) - 1, 0))


@pytest.mark.parametrize("framing, message", [(questions, FIND), (questions, SEND), (replies, FOUND), (replies, SENT)])
def test_b104_there_and_back(framing, message):
    assert framing.decode([framing.encode(message)]) == message


def test_the_largest_questions_fit():
    largest = SendBlocks(1 << 61, 1 << 40, (MODEL, ) * 4, (NAME, ) * MAX_NAMES, ((1 << 64) - 1, ) * MAX_PARTS,
                         "n" * 128, bytes(MAX_AGENT_BYTES), 1 << 63)
    frames = [questions.encode(largest)], [replies.encode(SentBlocks(1, ((1 << 64) - 1, ) * MAX_PARTS))]
    assert questions.decode(frames[0]) == largest and replies.decode(frames[1])
    assert all(len(frame) < MAX_BYTES for frame, in frames)


@pytest.mark.parametrize("bad", [
    {"names": ()}, {"names": (NAME[1:], )}, {"models": (MODEL + b"m", )}, {"models": ()}, {"number": -1},
    {"names": (NAME, ) * (MAX_NAMES + 1)}, {"models": (MODEL, ) * (MAX_MODELS + 1)}, {"length": -1}, {"names": ("n", )},
    {"addresses": (-1, )}, {"addresses": (1 << 65, )}, {"addresses": (1, ) * (MAX_PARTS + 1)}, {"agent": b""},
    {"agent": bytes(MAX_AGENT_BYTES + 1)}, {"agent_name": "n" * 129}, {"identity": None}],
    ids=lambda bad: next(iter(bad)))
def test_b104_what_is_beyond_the_bounds_is_no_question(bad):
    message = SEND if bad.keys() & {"addresses", "agent", "agent_name", "identity"} else FIND
    with pytest.raises((BadFrame, OverflowError, msgspec.MsgspecError)):
        questions.decode([questions.encode(msgspec.structs.replace(message, **bad))])


@pytest.mark.parametrize("framing, other", [(questions, replies.encode(FOUND)), (replies, questions.encode(FIND))])
def test_an_answer_is_no_question(framing, other):
    with pytest.raises(BadFrame):
        framing.decode([other])


@pytest.mark.parametrize("seed", range(20))
def test_b104_noise_is_a_bad_frame(seed):
    chance = random.Random(seed)
    for _ in range(200):
        frame = bytearray(questions.encode(chance.choice([FIND, SEND])))
        for _ in range(chance.randint(1, 5)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        del frame[chance.randint(1, len(frame)):]
        with contextlib.suppress(BadFrame):
            questions.decode([bytes(frame)])
