# SPDX-License-Identifier: Apache-2.0
"""Which prefill engine gets a job: room in tokens, what it has to compute, what it was given before."""
import collections
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.broker.choice import MAX_OFFERS, START_TOKENS_PER_S, JobTaker, choose
from vllm_pd.broker.preference import PrefillPreference
from vllm_pd.broker.prompts import BLOCK_TOKENS, MAX_BLOCKS, PromptMemory, block_names
from vllm_pd.broker.registry import QueueLimits, Registry
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec

BLOCK = 16
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK, 2, 2, 64, "hnd")
NUMBERS = iter(range(1 << 30))


def member(name, role=m.Role.PREFILL, **load):
    return m.Member(name, role, "tcp://127.0.0.1:1", FINGERPRINT, m.Load(**load))


def prompt(first, tokens):
    """Prompts with another `first` have nothing in common."""
    return [1_000_000 * first + number for number in range(tokens)]


def job(token_ids, cached_tokens=0, number=None, **more):
    return m.Job(m.Attempt("d", "r", next(NUMBERS) if number is None else number), "tcp://127.0.0.1:1", token_ids,
                 cached_tokens, 1e6, **more)


class OlderCredit(m.WireMessage, tag="Take"):
    """As an older broker knows it."""
    jobs: int
    serial: int


class Engine:
    """A prefill engine: what it holds, and its credits."""

    def __init__(self, name, max_jobs, max_tokens):
        self.name, self.max_jobs, self.max_tokens = name, max_jobs, max_tokens
        self.jobs = collections.deque()
        self.serial = 0

    @property
    def queued(self):
        return sum(job.new_tokens for job in self.jobs)

    @property
    def has_room(self):
        return len(self.jobs) < self.max_jobs and self.queued < self.max_tokens

    def credit(self):
        return m.Credit(self.max_jobs - len(self.jobs), self.serial, max(0, self.max_tokens - self.queued), self.queued)


class Fleet:
    """One D and some Ps at a registry. Messages arrive in order between any two, but any time later."""

    def __init__(self, *engines, limits=QueueLimits(ttl_s=1e9)):  # noqa: B008
        self.registry = Registry("b", limits)
        self.engines = {engine.name: engine for engine in engines}
        self.offers = {name: collections.deque() for name in self.engines}  # on their way
        self.credits = {name: collections.deque() for name in self.engines}
        self.given = []  # (engine, attempt number), in the order of the offers
        self.waiting = {}  # by number
        self.send("d", m.Register(member("d", m.Role.DECODE)))
        for name in self.engines:
            self.send(name, m.Register(member(name)))
            self.say(name)
        self.settle()

    def send(self, sender, message):
        for to, answer in self.registry.receive(0.0, sender, message):
            if isinstance(answer, m.Offer):
                self.offers[to].append(answer)
                self.given.append((to, answer.job.attempt.number))
                del self.waiting[answer.job.attempt.number]

    def put(self, one):
        self.waiting[one.attempt.number] = one
        self.send("d", m.Put(one))

    def say(self, name):
        self.credits[name].append(self.engines[name].credit())

    def credit_arrives(self, name):
        if self.credits[name]:
            self.send(name, self.credits[name].popleft())

    def offer_arrives(self, name):
        if self.offers[name]:
            offer = self.offers[name].popleft()
            engine = self.engines[name]
            assert engine.has_room, f"{name} has {len(engine.jobs)} jobs with {engine.queued} tokens"
            engine.serial = offer.serial
            engine.jobs.append(offer.job)
            self.say(name)

    def compute(self, name):
        if self.engines[name].jobs:
            self.engines[name].jobs.popleft()
            self.say(name)

    def settle(self):
        """All that is on its way arrives."""
        while any(self.offers.values()) or any(self.credits.values()):
            for name in self.engines:
                self.offer_arrives(name)
                self.credit_arrives(name)

    def may_take(self, name, one):
        return name not in one.avoid


steps = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 40), st.integers(0, 3), st.sets(st.sampled_from("pqr"), max_size=2)),
    st.tuples(st.sampled_from(["compute", "offer_arrives", "credit_arrives"]), st.sampled_from("pqr")))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=3, max_size=3), st.lists(steps, max_size=80))
def test_b5_room_is_kept_nobody_rests_and_every_job_comes_to_its_turn(sizes, moves):
    """Offers and credits cross on their way. An engine never gets an offer without room; when all has arrived nobody
    with room rests while a job that it may take waits; of jobs that the same engines may take the oldest goes first;
    and in the end each was given once, however long it is."""
    fleet = Fleet(*(Engine(name, *size) for name, size in zip("pqr", sizes, strict=True)))
    put = []
    for move, *rest in moves:
        if move == "put":
            tokens, first, avoid = rest
            one = job(prompt(first, tokens), number=len(put), avoid=tuple(sorted(avoid)))
            put.append(one)
            fleet.put(one)
        else:
            getattr(fleet, move)(*rest)
    for _ in range(len(put) + 1):
        fleet.settle()
        for name, engine in fleet.engines.items():
            assert not engine.has_room or not any(name not in one.avoid for one in fleet.waiting.values())
        for name in fleet.engines:
            fleet.compute(name)
    assert not fleet.waiting and len(fleet.registry) == 0
    assert sorted(number for _, number in fleet.given) == list(range(len(put)))
    for avoid in {one.avoid for one in put}:
        alike = [number for _, number in fleet.given if put[number].avoid == avoid]
        assert alike == sorted(alike)


queue_steps = st.one_of(
    st.tuples(st.sampled_from(["put", "withdraw"]), st.integers(0, 5)),
    st.tuples(st.just("credit"), st.sampled_from("pq")), st.tuples(st.just("come_back"), st.booleans()),
    st.tuples(st.just("pass_time"), st.integers(1, 40)), st.just(("leave", None)))


class Queue:
    """A registry, and which of the jobs 0 to 5 wait there, each until when. A job's number and 1 are its tokens."""

    def __init__(self):
        self.registry, self.now = Registry("b", QueueLimits(ttl_s=1e9)), 0.0
        self.waiting, self.offers, self.left = {}, [], True

    def receive(self, sender, message):
        self.sort(self.registry.receive(self.now, sender, message))

    def sort(self, messages):
        for _, reply in messages:
            if isinstance(reply, m.PutReply) and reply.refusal is None:
                self.waiting.setdefault(reply.attempt.number, self.now + 60.0)
        for to, offer in messages:
            if isinstance(offer, m.Offer):
                del self.waiting[offer.job.attempt.number]
                self.offers.append((to, offer))

    def put(self, number):
        self.left = False
        self.receive("d", m.Register(member("d", m.Role.DECODE)))
        one = m.Job(m.Attempt("d", "r", number), "tcp://127.0.0.1:1", prompt(number, number + 1), 0, 60.0)
        self.receive("d", m.Put(one))

    def withdraw(self, number):
        self.receive("d", m.Withdraw(m.Attempt("d", "r", number)))
        self.waiting.pop(number, None)

    def credit(self, name):
        self.receive(name, m.Register(member(name)))
        self.receive(name, m.Credit(2, 0))

    def come_back(self, gone):
        if self.offers:
            to, offer = self.offers.pop()
            if not self.left:
                self.waiting.setdefault(offer.job.attempt.number, self.now + offer.job.deadline_s)
            self.sort(self.registry.undeliverable(self.now, to, offer, gone))

    def pass_time(self, seconds):
        self.now += seconds
        self.waiting = {number: until for number, until in self.waiting.items() if until > self.now}
        self.sort(self.registry.handle_timeout(self.now))

    def leave(self, _):
        self.waiting.clear()
        self.left = True
        self.receive("d", m.Leave())


@settings(max_examples=400, deadline=None)
@given(st.lists(queue_steps, max_size=60))
def test_b5_the_queue_has_the_jobs_that_wait_and_no_other(moves):
    """Also where offers come back: a job waits once, and no longer than until it is withdrawn, over, or its decode
    engine leaves."""
    queue = Queue()
    for move, value in moves:
        getattr(queue, move)(value)
        assert len(queue.registry) == len(queue.waiting)
        assert queue.registry.queued_tokens == sum(number + 1 for number in queue.waiting)
    queue.pass_time(61)
    assert len(queue.registry) == 0 == queue.registry.queued_tokens


def test_a_job_of_any_length_is_taken_while_some_room_is_left_and_none_after_it():
    fleet = Fleet(Engine("p", 8, 100))
    fleet.put(job(prompt(1, 99)))
    fleet.put(job(prompt(2, 50_000)))
    fleet.put(job(prompt(3, 1)))
    fleet.settle()
    assert len(fleet.engines["p"].jobs) == 2 and len(fleet.waiting) == 1
    fleet.compute("p")
    fleet.settle()
    assert len(fleet.waiting) == 1, "50,000 tokens are more than 100"
    fleet.compute("p")
    fleet.settle()
    assert not fleet.waiting


def test_what_the_decode_engine_has_cached_takes_no_room():
    fleet = Fleet(Engine("p", 8, 100))
    for first in range(3):
        fleet.put(job(prompt(first, 1000), cached_tokens=960))
    assert len(fleet.waiting) == 0 and fleet.engines["p"].queued == 0, "offered before the first credit came back"
    fleet.put(job(prompt(4, 1000)))
    assert len(fleet.waiting) == 1, "three times 40 are more than 100"


def test_an_offer_that_was_lost_holds_its_room_until_it_counts_as_lost():
    registry = Registry("b", QueueLimits(ttl_s=5.0))
    for name, role in (("d", m.Role.DECODE), ("p", m.Role.PREFILL)):
        registry.receive(0.0, name, m.Register(member(name, role)))
    registry.receive(0.0, "p", m.Credit(8, 0, 100, 0))
    registry.receive(0.0, "d", m.Put(job(prompt(1, 5000))))
    assert len(registry) == 0, "it is lost on its way"
    registry.receive(1.0, "d", m.Put(job(prompt(2, 10))))
    assert registry.receive(2.0, "p", m.Credit(8, 0, 100, 0)) == [] and len(registry) == 1
    assert registry.receive(5.0, "p", m.Credit(8, 0, 100, 0)) and len(registry) == 0


def test_the_least_tokens_queued_not_the_most_slots_free():
    fleet = Fleet(Engine("p", 8, 10**6), Engine("q", 8, 10**6))
    fleet.put(job(prompt(1, 30_000)))
    for first in range(2, 7):
        fleet.put(job(prompt(first, 300)))
    assert [name for name, _ in fleet.given] == ["p", *"qqqqq"]


def test_an_engine_of_an_older_release_has_its_slots_alone():
    """A credit of two fields, as it is on the wire; with one such engine the others are compared by slots, too."""
    sender, credit = codec.decode([codec.encode("p", m.Credit(3, 7))])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["Take", 3, 7]), type=m.Credit) == credit == m.Credit(3, 7)
    assert credit.tokens is None and sender == "p"
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(m.Credit(3, 7, 5, 9)))
    assert newer == ["Take", 3, 7, 5, 9]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(m.Credit(3, 7, 5, 9)), type=OlderCredit) == OlderCredit(3, 7)
    old, new = JobTaker(), JobTaker()
    old.set_credit(m.Credit(2, 0))
    new.set_credit(m.Credit(1, 0, 10**6, 0))
    old.offer(0.0, job(prompt(1, 10**5)), ())
    new.offer(0.0, job(prompt(1, 3)), ())
    assert old.has_room() and not new.has_room()
    new.set_credit(m.Credit(2, 1, 10**6, 3))
    assert choose([old, new], job(prompt(2, 3)), ()) is new
    old.set_credit(m.Credit(5, 0))
    assert choose([old, new], job(prompt(2, 3)), ()) is old, "whatever it has queued"


def takers(*rates, jobs=8):
    """Of the incarnations "0", "1" and so on."""
    made = []
    for number, rate in enumerate(rates):
        taker = JobTaker()
        taker.reported(member(str(number), tokens_per_s=rate))
        taker.set_credit(m.Credit(jobs, 0, 10**9, 0))
        made.append(taker)
    return made


def give(found, token_ids, **more):
    """Who gets it."""
    one = job(token_ids, **more)
    names = block_names(one)
    chosen = choose(found, one, names)
    chosen.offer(float(next(NUMBERS)), one, names)
    return found.index(chosen)


def test_b5_a_common_beginning_goes_where_it_is_unless_the_queue_is_longer():
    found = takers(0.0, 0.0)
    common = prompt(1, 4096)
    assert give(found, common + prompt(2, 100)) == 0
    assert give(found, prompt(3, 5000)) == 1
    assert give(found, common + prompt(4, 100)) == 0, "before anything of it is computed"
    assert give(found, prompt(5, 20_000)) == 0, "the shorter queue"
    assert give(found, common + prompt(6, 100)) == 1, "20,000 tokens before it take longer than two times 4,096"


def test_a_hot_beginning_leaves_nobody_idle():
    found = takers(0.0, 0.0, 0.0)
    common = prompt(1, 1024)
    taken = collections.Counter(give(found, common + prompt(2 + number, 512)) for number in range(60))
    assert min(taken.values()) > 15, taken


def test_a_fast_engine_gets_as_much_more_and_an_unknown_speed_is_that_of_the_others():
    found = takers(1000.0, 3000.0, jobs=1000)
    for number in range(200):
        give(found, prompt(number, 100))
    assert 2.5 < found[1].queued_tokens / found[0].queued_tokens < 3.5
    found = takers(1000.0, 0.0, jobs=1000)
    for number in range(200):
        give(found, prompt(number, 100))
    assert abs(found[0].queued_tokens - found[1].queued_tokens) <= 100


@pytest.mark.parametrize("rate", [0.0, 1000.0])
def test_a_detour_is_made_once_the_queue_here_takes_longer(rate):
    """Where no speed is known the engines count as those of `START_TOKENS_PER_S`."""
    found = takers(rate, rate, jobs=1000)
    detours, per_s = (("0", 2.0), ("gone", 5.0)), rate or START_TOKENS_PER_S
    taken = [give(found, prompt(number, 100), detours=detours) for number in range(1000)]
    first = taken.index(0)
    assert 2.0 <= (first + 1) * 100 / per_s <= 2.2 and first > 10
    assert abs(taken[first:].count(0) - taken[first:].count(1)) <= 1, "from then on both have as much before it"
    assert found[1].queued_tokens - found[0].queued_tokens == pytest.approx(2.0 * per_s, abs=100)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_a_longer_detour_gets_no_more_tokens(short_s, more_s, sizes):
    def tokens_of_the_far_one(detour_s):
        found = takers(1000.0, 1000.0, jobs=1000)
        given = [give(found, prompt(number, size), detours=(("0", detour_s), ))
                 for number, size in enumerate(sizes)]
        return sum(size for size, place in zip(sizes, given, strict=True) if place == 0)
    assert tokens_of_the_far_one(short_s + more_s) <= tokens_of_the_far_one(short_s) + max(sizes)


def far_and_full(detours=(("far", 3.0), ), queued=500, **more):
    """A job of 100 tokens, at a registry with "far", which has room, and "near", which has none and `queued` tokens,
    half a second's work. Returns the registry, and the answers to the put."""
    registry = Registry("b", QueueLimits(ttl_s=1e9))
    registry.receive(0.0, "d", m.Register(member("d", m.Role.DECODE)))
    for name, credit in (("near", m.Credit(0, 0, 10**6, queued)), ("far", m.Credit(8, 0, 10**6, 0))):
        registry.receive(0.0, name, m.Register(member(name, tokens_per_s=1000.0)))
        registry.receive(0.0, name, credit)
    return registry, registry.receive(10.0, "d", m.Put(job(prompt(1, 100), detours=detours, **more)))


def offered(messages):
    return [to for to, message in messages if isinstance(message, m.Offer)]


def test_a_job_waits_for_a_near_engine_that_is_full_as_long_as_the_detour_at_most():
    registry, answers = far_and_full()
    assert offered(answers) == [] and len(registry) == 1
    assert offered(registry.receive(11.0, "near", m.Credit(1, 0, 10**6, 400))) == ["near"]
    registry, _ = far_and_full()
    assert offered(registry.handle_timeout(12.9)) == [] and offered(registry.handle_timeout(13.0)) == ["far"]


@pytest.mark.parametrize("more", [{"detours": ()}, {"detours": (("near", 1.0), ("far", 1.0))}, {"queued": 4000},
                                  {"avoid": ("near", )}])
def test_a_job_does_not_wait_where_that_gains_nothing(more):
    """The path to the other is no longer, what is queued here takes longer, nobody else may take it."""
    registry, answers = far_and_full(**more)
    assert offered(answers) == ["far"] and len(registry) == 0


def test_one_that_waits_for_a_near_engine_holds_up_no_other_and_is_before_those_that_came_later():
    registry, _ = far_and_full()
    assert offered(registry.receive(10.5, "d", m.Put(job(prompt(2, 100), avoid=("near", ))))) == ["far"]
    registry.receive(10.6, "d", m.Put(job(prompt(3, 100), detours=(("far", 3.0), ))))
    ((_, offer), ) = registry.receive(11.0, "near", m.Credit(1, 0, 10**6, 0))
    assert offer.job.token_ids == prompt(1, 100)


def test_a_prefix_beyond_a_slow_link_is_computed_again_where_that_is_sooner():
    found = takers(1000.0, 1000.0)
    common = prompt(1, 4096)
    assert give(found, common + prompt(2, 100)) == 0
    found[0].computed_since(100.0)
    assert give(found, common + prompt(3, 100), detours=(("0", 5.0), )) == 0, "twice 4.1 s"
    found[0].computed_since(100.0)
    assert give(found, common + prompt(4, 100), detours=(("0", 9.0), )) == 1


def test_detours_change_nothing_where_slots_decide_or_one_alone_fits():
    old, far = JobTaker(), JobTaker()
    far.reported(member("far"))
    for taker, jobs in ((old, 1), (far, 2)):
        taker.set_credit(m.Credit(jobs, 0))
    one = job(prompt(1, 100), detours=(("far", 60.0), ))
    assert choose([old, far], one, ()) is far, "no tokens are counted"
    assert choose([far], one, ()) is far


def test_the_broker_and_a_decode_engine_of_nats_make_the_same_detours():
    """The same jobs come, one after another, to the broker's registry and to the preference of one decode engine; the
    path to p takes 3 s longer."""
    fleet = Fleet(Engine("p", 1000, 10**9), Engine("q", 1000, 10**9))
    preference, members = PrefillPreference(), [member(name, tokens_per_s=1000.0) for name in "pq"]
    for one in members:
        fleet.send(one.incarnation, m.Register(one))
        preference.heard(one)
    preferred = []
    for number in range(40):
        one = job(prompt(number, 200), number=number, detours=(("p", 3.0), ))
        fleet.put(one)
        preferred.append(preference.prefer(0.0, one, members))
    assert [name for name, _ in fleet.given] == preferred
    assert 14 <= preferred.index("p") <= 15 and 10 <= preferred.count("p") <= 14


def test_the_queue_counts_what_is_left_of_it():
    """An engine reports whole prompts, for it looks into its cache only when it computes them."""
    (taker,) = takers(0.0)
    common = prompt(1, 1280)
    for number in range(4):
        one = job(common + prompt(2 + number, 20))
        taker.offer(0.0, one, block_names(one))
    assert taker.queued_tokens == 1300 + 3 * 20
    taker.set_credit(m.Credit(8, 4, 10**6, 3 * 1300))
    assert taker.queued_tokens == 3 * 20, "the first is computed"
    taker.set_credit(m.Credit(8, 4, 10**6, 1300 + 70))
    assert taker.queued_tokens == 2 * 20, "of the one before the last some is computed"
    taker.set_credit(m.Credit(8, 4, 10**6, 9000))
    assert taker.queued_tokens == 2 * 20 + 9000 - 2600, "what it has from elsewhere counts whole"


@pytest.mark.parametrize("queued", [0, 10**15])
def test_what_is_remembered_of_one_engine_is_bounded(queued):
    (taker,) = takers(0.0, jobs=10**9)
    for number in range(3 * MAX_OFFERS):
        serial = taker.offer(0.0, job([number] * BLOCK_TOKENS * 4), list(range(4 * number, 4 * number + 4)))
        taker.set_credit(m.Credit(10**9, serial, 10**9, queued))
        assert len(taker._offers) <= MAX_OFFERS
    for _ in range(2 * MAX_OFFERS):
        taker.offer(0.0, job([1]), [])
    assert len(taker._offers) <= MAX_OFFERS and len(taker._prompts) <= MAX_BLOCKS
    assert len(block_names(job([1] * (MAX_BLOCKS + 9) * BLOCK_TOKENS))) == MAX_BLOCKS


def test_a_memory_forgets_the_end_of_what_was_used_longest_ago():
    memory = PromptMemory(max_blocks=6)
    one, two, three = ([f"{name}{number}" for number in range(3)] for name in "abc")
    memory.add(one)
    memory.add(two)
    memory.add(one)
    memory.add(three[:1])
    held = [memory.held_tokens(names) // BLOCK_TOKENS for names in (one, two, three)]
    assert held == [3, 2, 1] and len(memory) == 6
    memory.limit(4 * BLOCK_TOKENS)
    assert [memory.held_tokens(names) // BLOCK_TOKENS for names in (one, two, three)] == [3, 0, 1]


def test_an_engine_holds_no_more_than_its_cache():
    taker, roomy = takers(0.0, 0.0)
    taker.reported(member("x", free_blocks=10 * BLOCK_TOKENS // BLOCK))
    for found in (taker, roomy):
        for first in range(4):
            one = job(prompt(first, 8 * BLOCK_TOKENS))
            found.offer(0.0, one, block_names(one))
    old = job(prompt(0, 8 * BLOCK_TOKENS))
    assert taker.left_tokens(old, block_names(old)) == 8 * BLOCK_TOKENS
    assert roomy.left_tokens(old, block_names(old)) == 1
    taker.reported(member("x", free_blocks=3))
    last = job(prompt(3, 8 * BLOCK_TOKENS))
    assert taker.left_tokens(last, block_names(last)) == 1, "blocks in use are no smaller cache"


def test_names_end_at_the_first_difference():
    dice = random.Random(3)
    text = [dice.randrange(50_000) for _ in range(9 * BLOCK_TOKENS)]
    other = text.copy()
    other[4 * BLOCK_TOKENS] += 1
    names, others = block_names(job(text)), block_names(job(other))
    assert len(names) == 9 and names[:4] == others[:4] and not set(names[4:]) & set(others[4:])
    assert block_names(job(text[:BLOCK_TOKENS - 1])) == []


# Where each decode engine chooses for itself.


def test_a_decode_engine_prefers_where_it_sent_the_beginning_before():
    preference = PrefillPreference()
    p, q = (member(name, tokens_per_s=1000.0) for name in "pq")
    preference.heard(member("d", m.Role.DECODE))
    preference.heard(p)
    assert len(preference) == 1 and preference.prefer(0.0, job(prompt(1, 300)), [p]) == "", "there is no choice"
    preference.heard(q)
    first = preference.prefer(1.0, job(prompt(1, 3000)), [p, q])
    second = preference.prefer(1.1, job(prompt(2, 3000)), [p, q])
    assert {first, second} == {"p", "q"}, "the other one has nothing to do"
    for number in range(4):
        now = 10.0 * (number + 1)
        assert preference.prefer(now, job(prompt(2, 3000) + prompt(9, 50)), [p, q]) == second, "all is computed by now"
    busy = msgspec.structs.replace(p if second == "p" else q, load=m.Load(job_tokens=50_000, tokens_per_s=1000.0))
    preference.heard(busy)
    assert preference.prefer(40.1, job(prompt(2, 3000)), [p, q]) == first
    preference.heard(msgspec.structs.replace(busy, load=m.Load(tokens_per_s=1000.0)))
    long = preference.prefer(50.0, job(prompt(5, 50_000)), [p, q])
    assert preference.prefer(60.0, job(prompt(5, 300)), [p, q]) != long, "40,000 tokens are before it"
    assert preference.prefer(110.0, job(prompt(5, 3000)), [p, q]) == long, "they are computed"
    preference.retain({first})
    assert len(preference) == 1 and preference.prefer(120.0, job(prompt(2, 3000)), [p, q]) == ""
