# SPDX-License-Identifier: Apache-2.0
"""Several machines on one: hosts that network, process ids and boot tell apart, a switch between them, and faults.

A host is a set of namespaces (network, process ids, mounts, host name, IPC) with a boot id, a /dev/shm and a /sys of
its own, so engines and UCX take it for another machine. Its `eth0` is plugged into a switch, a bridge in a namespace of
its own. The first process of each host, and that of the switch, waits for the end of its standard input; with it the
kernel ends all processes of the host, and removes its network. So nothing is left over, even if the process that holds
a `Rack` is killed.

Wants root, iproute2, nftables, util-linux, and a kernel with bridges, nftables for both, token buckets and TAP devices.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import IO

import psutil

from tests.hosts.wire import Wire

NET, NET6 = "10.79.0", "fd79:"
START_S = 30.0
COMMAND_S = 30.0
END_S = 30.0
_PROGRAMS = ("ip", "tc", "nft", "unshare", "nsenter")
_WIRE = Path(__file__).with_name("wire.py")
_NAMESPACES = ("--net", "--pid", "--mount", "--ipc", "--uts")
# One burst of the tested rates fits into a fraction of a second, and nothing that a test sends is dropped.
_SHAPED = "root tbf rate {rate} burst 16kb latency 2s"
# A packet that ends a connection passes: of a connection that one end has forgotten, the other end must learn.
_REJECT = "tcp flags & (fin|rst) == 0 reject with tcp reset"

_SWITCH = "set -e; ip link add name br0 type bridge; ip link set dev br0 up; echo ready; exec cat"
_HOST = """set -e
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
hostname "$2"
ip link set dev lo up
echo ready
exec cat"""
_TRIAL = f"""set -e
ip link add name br0 type bridge
ip link add name one type veth peer name other
ip link set dev one master br0
ip tuntap add dev tap mode tap
tc qdisc add dev other {_SHAPED.format(rate="4mbit")}
nft 'add table bridge t; add chain bridge t f {{ type filter hook forward priority 0; }}; add rule bridge t f iifname one drop'
nft 'add table inet t; add chain inet t i {{ type filter hook input priority 0; }}; add rule inet t i {_REJECT}'
mount --bind /dev/null /proc/sys/kernel/random/boot_id
mount -t sysfs sysfs /sys
hostname trial"""  # noqa: E501


@functools.lru_cache(maxsize=1)
def unavailable() -> str:
    """Why this machine can have no hosts; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 nftables util-linux"
    done = subprocess.run([*_unshared(), "sh", "-c", _TRIAL], capture_output=True, text=True, timeout=START_S)
    return f"no namespaces with a switch and a firewall: {done.stderr.strip()}" if done.returncode else ""


def _bad_wire(host: Host) -> tuple[str, str, str]:
    """The names of what makes the cable of that host a bad one: a switch of its own, to which it is plugged, and the
    ends of the wire between that and the switch of all."""
    return f"w{host.number}", f"w{host.number}a", f"w{host.number}b"


def _unshared() -> list[str]:
    return ["unshare", *_NAMESPACES, "--mount-proc", "--fork", "--kill-child"]


class _Space:
    """Namespaces that live as long as their first process. `pid` is its number outside of them."""

    def __init__(self, command: list[str], is_forked: bool) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, text=True, start_new_session=True)
        is_ready = select.select([self._process.stdout], [], [], START_S)[0]
        said = self._process.stdout.readline() if is_ready else f"nothing within {START_S:g} s"
        if said != "ready\n":
            self.end()
            raise OSError(f"no namespaces: {said.strip()}")
        self.pid = psutil.Process(self._process.pid).children()[0].pid if is_forked else self._process.pid

    def run(self, *command: str) -> None:
        """Run a command in the network namespace. Raises OSError with what it says where it fails."""
        done = subprocess.run(["nsenter", "--target", str(self.pid), "--net", *command], capture_output=True, text=True,
                              timeout=COMMAND_S)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def kill(self) -> None:
        """SIGKILL to all processes in it. Returns when none is left."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(END_S)

    def end(self) -> None:
        """Let it end, if it has not yet."""
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and with it, its first process
            self._process.wait(END_S)
        self._process.stdout.close()


class Host:
    """One machine of a `Rack`, which makes it. `folder` is for its logs."""

    def __init__(self, rack: Rack, name: str, number: int, folder: Path) -> None:
        folder.mkdir()
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.name, self.number, self.folder = name, number, folder
        self.ip, self.ip6 = f"{NET}.{number}", f"{NET6}:{number}"
        self._rack = rack
        self._programs: list[subprocess.Popen] = []
        self._space = _Space([*_unshared(), "sh", "-c", _HOST, "sh", str(folder), name], is_forked=True)

    @property
    def pid(self) -> int:
        """The number, outside, of its first process."""
        return self._space.pid

    def start(self, command: list[str], output: IO | int, errors: Path, environment: dict[str, str] | None = None,
              **options: object) -> subprocess.Popen:
        """Start a program on it. The errors are appended to that file. The process that is returned waits for the
        program; both end with the host. `options` are those of Popen."""
        with errors.open("ab") as log:
            program = subprocess.Popen(self._entered(command), stdout=output, stderr=log, start_new_session=True,
                                       env={**os.environ, **(environment or {})}, **options)
        self._programs.append(program)
        return program

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> str:
        """The output of a command on it. Raises CalledProcessError, TimeoutExpired."""
        return subprocess.run(self._entered(list(command)), check=True, capture_output=True, text=True,
                              timeout=timeout_s).stdout

    def listening(self) -> set[str]:
        """The addresses at which any process of it listens, by TCP or UDP, as `ss` has them."""
        sockets = self.run("ss", "-H", "--listening", "--tcp", "--udp", "--numeric").splitlines()
        return {line.split()[4].rpartition(":")[0] for line in sockets}

    def know(self, addresses: dict[str, str]) -> None:
        """From now on its programs know these names, and no others."""
        file = self.folder / "hosts"
        file.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        self.run("mount", "--bind", str(file), "/etc/hosts")

    def sysctl(self, name: str, value: int) -> None:
        """Set `net.NAME` of its kernel; `name` has slashes."""
        self._space.run("sh", "-c", f"echo {value} > /proc/sys/net/{name}")

    def add_device(self, name: str, address: str) -> None:
        """Give it one more network, of which it is the only member."""
        self._configure(f"link add name {name} type bridge", f"addr add {address}/24 dev {name}",
                        f"link set dev {name} up")

    def connect(self, other: Host, name: str, net: str, rate: str) -> None:
        """A further cable between the two, called `name` at both, with addresses of `net` ("10.80.0"). Each sends at
        that rate of `tc` at most."""
        self._configure(f"link add name {name} type veth peer name {name} netns {other.pid}")
        for host in (self, other):
            host._configure(f"addr add {net}.{host.number}/24 dev {name}", f"link set dev {name} up")
            host.shape(name, rate)

    def shape(self, device: str, rate: str) -> None:
        """From now on that device sends at that rate of `tc` at most."""
        self._space.run("tc", "qdisc", "add", "dev", device, *_SHAPED.format(rate=rate).split())

    def unshape(self, device: str) -> None:
        """That device sends as fast as it can again."""
        self._space.run("tc", "qdisc", "del", "dev", device, "root")

    def readdress(self, address: str = "") -> None:
        """From now on its eth0 has this address of IPv4 alone, which is its `ip` then; "": none, and `ip` stays."""
        self._configure("-4 addr flush dev eth0", *([f"addr add {address}/24 dev eth0"] if address else []))
        self.ip = address or self.ip

    def switch_off(self, device: str = "eth0") -> None:
        """That device is down, and the other end of its cable notices it, until `switch_on`."""
        self._configure(f"link set dev {device} down")

    def switch_on(self, device: str = "eth0") -> None:
        """That device is up again, with the addresses that it had."""
        self._configure(f"link set dev {device} up")
        if device == "eth0":
            self._configure(f"addr replace {self.ip6}/64 dev eth0 nodad")  # the kernel keeps those of IPv4 alone

    def drop(self, device: str, ports: str = "", other: Host | None = None) -> None:
        """Its firewall drops whatever comes in by that device, from `other` or from everybody, or to those TCP ports of
        it ("30000-30099"), until `accept`."""
        source = "" if other is None else f"ip saddr {other.ip} "
        self._filter(f'iifname "{device}" {source}{f"tcp dport {ports} " if ports else ""}drop')

    def reject(self, other: Host, device: str = "eth0") -> None:
        """Its firewall answers with a reset whatever `other` sends by TCP to that device: connections that are open end
        at once, and new ones are refused to `other`, until `accept`."""
        self._filter(f'iifname "{device}" ip saddr {other.ip} {_REJECT}')

    def open_only(self, ports: str) -> None:
        """Its firewall drops what begins a connection by TCP to another port than these ("5702, 30000-30009"), until
        `accept`."""
        self._filter(f"tcp flags & (syn | ack) == syn tcp dport != {{ {ports} }} drop")

    def load(self, rules: str) -> None:
        """Its firewall has these rules of `nft -f` as well, until `accept`. Raises OSError where they are none."""
        file = self.folder / "rules.nft"
        file.write_text(rules)
        self._space.run("nft", "-f", str(file))

    def accept(self) -> None:
        """Its firewall lets everything in."""
        self._space.run("nft", "flush ruleset")

    def power_off(self) -> None:
        """It is gone at once: nothing of it says goodbye to the others, whose networks stay as they are."""
        self._rack.unplug(self)
        self._space.kill()
        self.close()

    def close(self) -> None:
        """End everything on it, if that has not happened yet. Leaves its folder."""
        self._space.end()
        for program in self._programs:
            program.wait(END_S)
            for pipe in (program.stdin, program.stdout):
                if pipe is not None:
                    pipe.close()
        self._programs.clear()

    def plug_in(self, switch: int) -> None:
        """Connect it to the switch that is in the network namespace of that process."""
        self._configure(f"link add name eth0 type veth peer name {self.name} netns {switch}",
                        f"addr add {self.ip}/24 dev eth0", f"addr add {self.ip6}/64 dev eth0 nodad",
                        "link set dev eth0 up")

    def _configure(self, *commands: str) -> None:
        for command in commands:
            self._space.run("ip", *command.split())

    def _filter(self, rule: str) -> None:
        self._space.run("nft", f"add table inet faults; add chain inet faults in {{ type filter hook input priority 0; "
                               f"}}; add rule inet faults in {rule}")

    def _entered(self, command: list[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, *command]


class Rack:
    """Hosts and their switch. A context manager; all that it has made ends with it. `folder` is for boot ids and logs.

        with Rack(folder) as rack:
            p, d = rack.host("p"), rack.host("d")  # 10.79.0.1, 10.79.0.2
            rack.cut(p, d)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ends = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._wires: dict[Host, _Space] = {}  # of hosts whose cable is a bad one

    def __enter__(self) -> Rack:
        self._switch = _Space(["unshare", "--net", "sh", "-c", _SWITCH], is_forked=False)
        self._ends.callback(self._switch.end)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for wire in self._wires.values():
            wire.end()
        self._ends.close()

    def host(self, name: str) -> Host:
        """A new one, connected to all others. The name is that of its port at the switch, at most 15 characters."""
        host = Host(self, name, next(self._numbers), self.folder / name)
        self._ends.callback(host.close)
        host.plug_in(self._switch.pid)
        for command in (f"link set dev {name} master br0", f"link set dev {name} up"):
            self._switch.run("ip", *command.split())
        return host

    def cut(self, one: Host, other: Host, one_way: bool = False) -> None:
        """The switch passes nothing from one to the other, nor back unless `one_way`, and nobody is told, until
        `heal`."""
        ways = [(one, other)] if one_way else [(one, other), (other, one)]
        rules = "; ".join(f"add rule bridge faults pass iifname {a.name} oifname {b.name} drop" for a, b in ways)
        self._switch.run("nft", "add table bridge faults; add chain bridge faults pass { type filter hook forward "
                                f"priority 0; }}; {rules}")

    def spoil(self, host: Host, wire: Wire) -> None:
        """The cable between the switch and that host is that bad, until `heal`. It is a good one, and not cut."""
        name, *ends = _bad_wire(host)
        self._wires[host] = _Space(["nsenter", "--target", str(self._switch.pid), "--net", sys.executable,
                                    str(_WIRE), *ends, json.dumps(dataclasses.asdict(wire))], is_forked=False)
        for command in (f"link add name {name} type bridge", f"link set dev {ends[0]} master {name}",
                        f"link set dev {ends[1]} master br0", f"link set dev {host.name} master {name}",
                        *(f"link set dev {one} up" for one in (name, *ends))):
            self._switch.run("ip", *command.split())

    def heal(self) -> None:
        """The switch passes everything, and all cables are good."""
        self._switch.run("nft", "flush ruleset")
        for host, wire in self._wires.items():
            self._switch.run("ip", "link", "set", "dev", host.name, "master", "br0")
            wire.end()
            self._switch.run("ip", "link", "del", "dev", _bad_wire(host)[0])
        self._wires.clear()

    def unplug(self, host: Host) -> None:
        """The switch has no connection to that host any more."""
        self._switch.run("ip", "link", "set", "dev", host.name, "down")
