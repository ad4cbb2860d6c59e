"""The lookup protocol without I/O: table against server wire, with clocks that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import HashError, LookupTimeout, ProtocolMismatch, TransportError
from kvpool.hashes import BlockHashes
from kvpool.protocols import _lookup_wire as wire
from kvpool.protocols._lookup_table import RequestTable
from kvpool.protocols._lookup_wire import NS, Clock, Code, Fault, Incoming, ServerWire, host_clock
from kvpool.protocols.binary import BinaryCodec
from kvpool.transport import MAX_TIMEOUT, LookupRequest, LookupResult

NAMESPACE, EPOCH = b"n" * 16, b"e" * 16
REQUEST = LookupRequest(NAMESPACE, EPOCH, 100, 16, BlockHashes(b"h" * 64, 32, scheme="chained"))
RESULT = LookupResult(96, (96, 64), EPOCH, 1.5)
SAME_HOST = b"samehost"


@dataclass
class Hand:
    """A clock that moves by hand, in seconds."""

    seconds: float = 1000.0

    def clock(self, name: bytes = SAME_HOST) -> Clock:
        return Clock(name, lambda: int(self.seconds * NS))


def make_table(hand: Hand, name: bytes = SAME_HOST, **options: int) -> RequestTable:
    options.setdefault("max_frame_bytes", 1 << 20)
    return RequestTable(BinaryCodec(), peer="peer", clock=hand.clock(name), **options)


def send(table: RequestTable) -> list[Buffer]:
    unsent = table.next_unsent()
    assert unsent is not None
    ticket, header, hashes = unsent
    table.sent(ticket)
    return [header, b"".join(hashes)]


def accepted(server: ServerWire, frames: list[Buffer]) -> Incoming:
    incoming = server.accept(frames)
    assert isinstance(incoming, Incoming)
    return incoming


def test_a_request_and_its_answer_arrive_whole() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), namespace=NAMESPACE, clock=hand.clock())
    ticket = table.submit(REQUEST, 0.5)
    assert table.outstanding == 1
    incoming = accepted(server, send(table))
    assert (incoming.id, incoming.request) == (ticket, REQUEST)
    assert incoming.deadline_ns == int(1000.5 * NS)
    table.receive([server.reply(incoming.id, RESULT)])
    assert table.has_done
    assert table.take_done() == [(ticket, RESULT)]
    assert not table.has_done
    assert table.take_done() == []
    assert table.outstanding == 0
    assert table.next_unsent() is None


def test_answers_in_any_order_reach_their_own_tickets() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    tickets = [table.submit(replace(REQUEST, num_tokens=100 + i), 1.0) for i in range(20)]
    incoming = [accepted(server, send(table)) for _ in tickets]
    assert [i.request.num_tokens for i in incoming] == [100 + i for i in range(20)]
    for i in reversed(incoming):
        table.receive([server.reply(i.id, replace(RESULT, hit_length=i.request.num_tokens - 20))])
    assert sorted(table.take_done()) == [(t, replace(RESULT, hit_length=80 + i)) for i, t in enumerate(tickets)]


def test_late_replies_are_dropped_and_ids_never_come_back() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    first = table.submit(REQUEST, 0.5)
    late = accepted(server, send(table))
    hand.seconds += 0.5
    [(ticket, outcome)] = table.take_done()
    assert ticket == first
    assert isinstance(outcome, LookupTimeout)
    second = table.submit(REQUEST, 0.5)
    assert second != first
    table.receive([server.reply(late.id, RESULT)])
    table.receive([server.reply(late.id, RESULT)])
    assert table.take_done() == []
    assert table.counts == {"late": 2}
    assert table.outstanding == 1


def test_a_reply_that_comes_with_the_deadline_is_late() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    reply = server.reply(accepted(server, send(table)).id, RESULT)
    hand.seconds += 0.5
    table.receive([reply])
    [(_, outcome)] = table.take_done()
    assert isinstance(outcome, LookupTimeout)


def test_a_second_reply_to_one_request_is_dropped() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    ticket = table.submit(REQUEST, 0.5)
    reply = server.reply(accepted(server, send(table)).id, RESULT)
    table.receive([reply])
    table.receive([reply])
    assert table.take_done() == [(ticket, RESULT)]


def test_a_reply_to_a_request_that_was_never_sent_is_dropped() -> None:
    table = make_table(Hand())
    ticket = table.submit(REQUEST, 0.5)
    table.receive([ServerWire(BinaryCodec()).reply(ticket, RESULT)])
    assert table.take_done() == []
    assert table.outstanding == 1


@pytest.mark.parametrize("when", ["unsent", "sent", "done"])
def test_a_cancelled_ticket_is_never_reported(when: str) -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    ticket = table.submit(REQUEST, 0.5)
    if when != "unsent":
        frames = send(table)
        if when == "done":
            table.receive([server.reply(accepted(server, frames).id, RESULT)])
    table.cancel(ticket)
    table.cancel(ticket)
    hand.seconds += 1
    assert table.take_done() == []
    assert table.next_unsent() is None
    assert table.outstanding == 0


def test_what_was_not_sent_in_time_is_not_sent_at_all() -> None:
    hand = Hand()
    table = make_table(hand)
    stale = table.submit(REQUEST, 0.5)
    fresh = table.submit(REQUEST, 5)
    hand.seconds += 1
    unsent = table.next_unsent()
    assert unsent is not None
    assert unsent[0] == fresh
    [(ticket, outcome)] = table.take_done()
    assert ticket == stale
    assert "no live server took it" in str(outcome)


def test_time_is_bounded_on_both_sides() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    for timeout in (float("inf"), 1e9):
        table.submit(REQUEST, timeout)
        assert accepted(server, send(table)).deadline_ns == int((hand.seconds + MAX_TIMEOUT) * NS)
    assert table.seconds_left() == MAX_TIMEOUT
    for timeout in (0.0, -1.0, float("nan")):
        table.submit(REQUEST, timeout)
        [(_, outcome)] = table.take_done()
        assert isinstance(outcome, LookupTimeout)
    forged = wire.pack_lookup(1, REQUEST, BinaryCodec(), SAME_HOST, (1 << 63) - 1, (1 << 64) - 1)
    assert accepted(server, [forged, b"\0\0"]).deadline_ns == int((hand.seconds + MAX_TIMEOUT) * NS)


def test_a_request_that_waited_in_a_frozen_servers_queue_is_dropped() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    queued = send(table)
    hand.seconds += 0.5
    assert server.accept(queued) is None
    assert server.counts == {"expired": 1}


def test_another_hosts_clock_is_learnt_from_its_first_reply() -> None:
    ours, theirs = Hand(1000), Hand(7)
    table, server = make_table(ours, b"our host"), ServerWire(BinaryCodec(), clock=theirs.clock(b"theirs.."))
    table.submit(REQUEST, 0.5)
    first = send(table)
    theirs.seconds += 100  # nothing is known of their clock yet: the time left counts from receipt
    incoming = accepted(server, first)
    assert incoming.deadline_ns == int(107.5 * NS)
    table.receive([server.reply(incoming.id, RESULT)])

    table.submit(REQUEST, 0.5)
    table.submit(REQUEST, 0.5)
    prompt, queued = send(table), send(table)
    assert accepted(server, prompt).deadline_ns == int(107.5 * NS)
    theirs.seconds += 0.5
    assert server.accept(queued) is None
    # Another server takes over: its clock is unknown again, and a server on our own host shares ours.
    table.submit(REQUEST, 0.5)
    other = ServerWire(BinaryCodec(), clock=Hand(0).clock(b"another."))
    table_frames = send(table)
    assert accepted(other, table_frames).deadline_ns == int(0.5 * NS)


def test_the_learnt_clock_is_never_ahead_of_the_servers() -> None:
    ours, theirs = Hand(1000), Hand(7)
    table, server = make_table(ours, b"our host"), ServerWire(BinaryCodec(), clock=theirs.clock(b"theirs.."))
    table.submit(REQUEST, 5)
    reply = server.reply(accepted(server, send(table)).id, RESULT)
    ours.seconds += 1  # the reply takes a second
    theirs.seconds += 1
    table.receive([reply])
    table.submit(REQUEST, 5)
    assert accepted(server, send(table)).deadline_ns == int((theirs.seconds + 5 - 1) * NS)


def test_processes_of_this_host_share_a_clock() -> None:
    clock = host_clock()
    assert len(clock.id) == 8
    assert clock is host_clock()


def test_after_a_lost_connection_all_that_is_open_is_sent_again_in_order() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    lost, done, unsent = (table.submit(replace(REQUEST, num_tokens=100 + i), 0.5) for i in range(3))
    send(table)
    table.receive([server.reply(accepted(server, send(table)).id, RESULT)])
    table.send_again()
    again = [accepted(server, send(table)) for _ in range(2)]
    assert [i.id for i in again] == [lost, unsent]
    assert again[0].request.num_tokens == 100
    assert again[0].deadline_ns == int(1000.5 * NS)
    for incoming in again:
        table.receive([server.reply(incoming.id, RESULT)])
        table.receive([server.reply(incoming.id, RESULT)])
    assert [ticket for ticket, _ in table.take_done()] == [done, lost, unsent]


def test_timeouts_are_counted_until_somebody_speaks() -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    late = accepted(server, send(table))
    given_up = table.submit(REQUEST, 5)
    table.give_up(given_up)
    table.give_up(given_up)
    hand.seconds += 1
    [(_, outcome)] = table.take_done()
    assert isinstance(outcome, LookupTimeout)
    assert table.timeouts == 2
    table.receive([server.reply(late.id, RESULT)])
    assert table.timeouts == 0


class OtherCodec(BinaryCodec):
    name = "other"


def refused(server: ServerWire, table: RequestTable, frames: list[Buffer]) -> TransportError:
    reply = server.accept(frames)
    assert isinstance(reply, bytes)
    table.receive([reply])
    [(_, outcome)] = table.take_done()
    assert isinstance(outcome, TransportError)
    return outcome


def test_another_namespace_is_refused_by_name() -> None:
    table, server = make_table(Hand()), ServerWire(BinaryCodec(), namespace=b"s" * 16, clock=Hand().clock())
    table.submit(REQUEST, 0.5)
    error = refused(server, table, send(table))
    assert isinstance(error, ProtocolMismatch)
    assert (b"s" * 16).hex() in str(error)
    assert NAMESPACE.hex() in str(error)


def test_another_codec_is_refused_by_name() -> None:
    table, server = make_table(Hand()), ServerWire(OtherCodec(), clock=Hand().clock())
    table.submit(REQUEST, 0.5)
    error = refused(server, table, send(table))
    assert isinstance(error, ProtocolMismatch)
    assert "'other'" in str(error)
    assert "'binary'" in str(error)


@pytest.mark.parametrize("who", ["client", "server"])
def test_another_version_is_refused_by_name_on_either_side(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    if who == "client":
        monkeypatch.setattr(wire, "VERSION", 9)
        frames = send(table)
        monkeypatch.undo()
        error = refused(server, table, frames)
        assert "server speaks protocol version 1, the client version 9" in str(error)
    else:
        incoming = accepted(server, send(table))
        monkeypatch.setattr(wire, "VERSION", 9)
        reply = server.reply(incoming.id, RESULT)
        monkeypatch.undo()
        table.receive([reply])
        [(_, error_)] = table.take_done()
        assert isinstance(error_, ProtocolMismatch)
        assert "client speaks protocol version 1, the server version 9" in str(error_)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h, f: [h],
        lambda h, f: [h, f, b"more"],
        lambda h, f: [h[:-1], f],
        lambda h, f: [h + b"x", f],
        lambda h, f: [h, b""],
        lambda h, f: [h, f[:-1]],
        lambda h, f: [h[:-64] + b"unchained".ljust(64, b"\0"), f],
        lambda h, f: [h[:-64] + b"\xff" * 64, f],
        lambda h, f: [h[:48] + b"\0" * 8 + h[56:], f],  # 16 local tokens of none
    ],
)
def test_a_request_that_cannot_be_read_is_answered_so(spoil: Callable[[bytes, bytes], list[Buffer]]) -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    header, frame = (bytes(f) for f in send(table))
    error = refused(server, table, spoil(header, frame))
    assert "cannot read the request" in str(error)
    assert server.counts == {"malformed": 1}


@given(st.lists(st.binary(max_size=300), max_size=4), st.booleans())
def test_garbage_never_raises_at_the_server(frames: list[bytes], ours: bool) -> None:
    server = ServerWire(BinaryCodec(), clock=Hand().clock())
    if ours and frames:
        frames[0] = b"kvpl\1\1\0\0" + frames[0]
    assert not isinstance(server.accept(frames), Incoming)
    assert sum(server.counts.values()) == 1


@given(st.binary(max_size=200), st.sampled_from([1, 2, 3, 77]))
def test_garbage_in_a_reply_ends_its_ticket_with_an_error(body: bytes, kind: int) -> None:
    table = make_table(Hand())
    ticket = table.submit(REQUEST, 0.5)
    send(table)
    table.receive([])
    table.receive([body])
    table.receive([b"kvpl\1\2\0\0" + ticket.to_bytes(8, "big"), b"two frames"])
    assert table.counts == {"foreign": 3}
    assert table.outstanding == 1
    table.receive([b"kvpl\1" + bytes([kind]) + b"\0\0" + ticket.to_bytes(8, "big") + body])
    [(done, outcome)] = table.take_done()
    assert done == ticket
    assert isinstance(outcome, TransportError)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RESULT, hit_length=100),  # a hit is shorter than the prompt
        replace(RESULT, boundaries=(101,)),
        replace(RESULT, max_age=-1.0),
        replace(RESULT, max_age=float("nan")),
    ],
)
def test_an_impossible_result_is_no_hit(wrong: LookupResult) -> None:
    hand = Hand()
    table, server = make_table(hand), ServerWire(BinaryCodec(), clock=hand.clock())
    table.submit(REQUEST, 0.5)
    table.receive([server.reply(accepted(server, send(table)).id, wrong)])
    [(_, outcome)] = table.take_done()
    assert isinstance(outcome, TransportError)
    assert "cannot be read" in str(outcome)


def test_too_many_boundaries_and_very_long_texts_still_fit_a_reply() -> None:
    server = ServerWire(BinaryCodec(), clock=Hand().clock())
    for outcome in (replace(RESULT, boundaries=(1,) * 5000), Fault(Code.HANDLER, "x" * 100_000)):
        reply = server.reply(1, outcome)
        assert len(reply) <= wire.MAX_REPLY_BYTES
    assert server.counts == {"handler": 2}
    assert len(server.reply(1, replace(RESULT, boundaries=(1,) * 1024))) <= wire.MAX_REPLY_BYTES


class BrokenCodec(HashCodec):
    name = "broken"

    def encode(self, hashes: BlockHashes) -> Sequence[Buffer]:
        raise KeyError("encode")

    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        raise KeyError("decode")


def test_a_request_that_cannot_be_carried_fails_at_once() -> None:
    hand = Hand()
    small = make_table(hand, max_frame_bytes=65)
    odd = replace(REQUEST, hashes=BlockHashes(b"", 32, scheme="schéma"))
    crowded = make_table(hand, max_outstanding=1)
    crowded.submit(REQUEST, 0.5)
    broken = RequestTable(BrokenCodec(), peer="peer", max_frame_bytes=1 << 20, clock=hand.clock())
    for table, request, reason in (
        (small, REQUEST, "66 bytes of hashes are over max_frame_bytes=65"),
        (make_table(hand), odd, "hash scheme"),
        (crowded, REQUEST, "does not keep up"),
        (broken, REQUEST, "encode"),
    ):
        ticket = table.submit(request, 0.5)
        [(done, outcome)] = table.take_done()
        assert done == ticket
        assert isinstance(outcome, TransportError)
        assert reason in str(outcome)


def test_a_codec_that_breaks_on_the_server_is_a_malformed_request() -> None:
    hand = Hand()
    server = ServerWire(BrokenCodec(), clock=hand.clock())
    header = wire.pack_lookup(1, REQUEST, BrokenCodec(), SAME_HOST, int(2000 * NS), 0)
    assert isinstance(server.accept([header, b""]), bytes)
    assert server.counts == {"malformed": 1}


def test_many_cancelled_lookups_leave_nothing_behind() -> None:
    table = make_table(Hand(), max_outstanding=8)
    keep = table.submit(REQUEST, 1.0)
    for _ in range(1000):
        table.cancel(table.submit(REQUEST, 50.0))
    assert len(table._deadlines) <= 16
    assert len(table._unsent) == 1
    unsent = table.next_unsent()
    assert unsent is not None
    assert unsent[0] == keep


def test_requests_that_cannot_be_are_refused_where_they_are_made() -> None:
    for wrong in ({"namespace": b"short"}, {"epoch": b""}, {"local_tokens": 101}, {"local_tokens": -1}):
        with pytest.raises(ValueError, match="lookup"):
            replace(REQUEST, **wrong)
    with pytest.raises(HashError):
        BlockHashes(b"abc", 2, scheme="chained")
