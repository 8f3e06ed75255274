"""Apache Kafka itself, one node or three, from its own jars: for tests, benches and people."""

import base64
import contextlib
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kafka.errors import KafkaError

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic_state import running_brokers
from tests.services.broker_properties import Ports, Scram, node_settings
from tests.services.jars import alone, class_archive, jars_directory, resolve_jars
from tests.services.needs import JAVA
from tests.services.processes import Service, free_port, listens
from tests.services.proxy import Proxy, running_proxy

JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-Djava.awt.headless=true")
# Half the CPU time of a start; a broker that serves for long is faster without.
QUICK_JVM = (*JVM, "-XX:TieredStopAtLevel=1")


class Node:
    """One broker, controller too. Its port and its data stay the same over every restart."""

    def __init__(
        self, directory: Path, ports: Ports, properties: Mapping[str, str], jvm: Sequence[str]
    ) -> None:
        self._directory = directory
        self._jvm = tuple(jvm)
        self._service: Service | None = None
        self.id = int(properties["node.id"])
        self.port = ports.client
        directory.mkdir(parents=True, exist_ok=True)
        self._properties = directory / "server.properties"
        self._properties.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        # It may hold a password.
        self._properties.chmod(0o600)

    @property
    def running(self) -> bool:
        """Whether its process exists; a frozen one does."""
        return self._service is not None and self._service.running

    @property
    def data(self) -> Path:
        """Where its segments lie."""
        return self._directory / "data"

    @property
    def pid(self) -> int:
        """The process id of the broker's Java."""
        return self._running().pid

    def format(self, cluster_id: str, scram: Scram | None) -> None:
        """Prepare empty storage; does nothing where there is some."""
        if (self.data / "meta.properties").exists():
            return
        options = scram.format_options if scram else []
        answer = subprocess.run(
            [
                *_java(QUICK_JVM, "kafka.tools.StorageTool"),
                *("format", "-t", cluster_id, "-c", str(self._properties)),
                *options,
            ],
            capture_output=True,
            text=True,
        )
        if answer.returncode != 0:
            raise RuntimeError(f"the storage could not be formatted:\n{answer.stderr[-2000:]}")

    def launch(self) -> None:
        """Start the process; `wait` waits until it can be reached."""
        command = [*_java(self._jvm, "kafka.Kafka"), str(self._properties)]
        self._service = Service(command, log=self._directory / "broker.log")

    def wait(self) -> None:
        """Wait until it accepts connections. Raises RuntimeError where the process ends."""
        self._running().until(lambda: listens(self.port), f"broker {self.id}")

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered."""
        self._running().freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self._running().thaw()

    def kill(self) -> None:
        """SIGKILL. The page cache survives it, so that nothing acknowledged is lost."""
        if self.running:
            self._running().kill()

    def ask_to_end(self) -> None:
        """SIGTERM: it hands its leaderships over and flushes its logs."""
        if self.running:
            self._running().ask_to_end()

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; SIGKILL where that takes too long."""
        if self.running:
            self._running().stop()

    def until(self, answers: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `answers()`, as long as the process lives."""
        self._running().until(answers, f"broker {self.id}", timeout_s)

    def _running(self) -> Service:
        if self._service is None:
            raise RuntimeError(f"broker {self.id} was never started")
        return self._service


class Kafka:
    """A cluster of one or three combined nodes.

    `access` is how to reach it, `bootstrap` the same servers as one string, `proxies` what stands
    before each node, if anything does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ports: list[Ports],
        scram: Scram | None = None,
        extra: Mapping[str, str] | None = None,
        jvm: Sequence[str] = JVM,
    ) -> None:
        """One node for each of `ports`, with data under `directory` that outlives this object.

        `scram` needs TLS and a password from everybody; `extra` are broker properties.
        """
        self._directory = directory
        self._scram = scram
        self.nodes = [
            Node(
                directory / f"node-{index + 1}",
                own,
                node_settings(
                    index,
                    ports,
                    data=directory / f"node-{index + 1}" / "data",
                    scram=scram,
                    extra=extra or {},
                ),
                jvm,
            )
            for index, own in enumerate(ports)
        ]
        self.bootstrap = ",".join(f"127.0.0.1:{own.public}" for own in ports)
        self.proxies: list[Proxy] = []
        self.access = KafkaAccess(
            servers=tuple(self.bootstrap.split(",")),
            ca_file=scram.certificates.authority if scram else None,
            username=scram.username if scram else None,
            password=scram.password if scram else None,
        )

    def start(self) -> None:
        """Format what is empty, start every node and wait until all answer.

        Raises RuntimeError with the end of a broker's log where one does not come up; nothing
        is left running then.
        """
        try:
            cluster_id = self._cluster_id()
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(lambda node: node.format(cluster_id, self._scram), self.nodes))
            for node in self.nodes:
                node.launch()
            self.wait()
        except BaseException:
            self.kill()
            raise

    def wait(self, timeout_s: float = 120) -> None:
        """Wait until every node that runs is known to the cluster and accepts connections."""
        running = [node for node in self.nodes if node.running]
        for node in running:
            node.wait()
        expected = {node.id for node in running}
        running[0].until(lambda: self._answering() >= expected, timeout_s)

    def restart(self, node: Node) -> None:
        """Bring back a node that was killed or stopped, on its port and data, and wait for it."""
        node.launch()
        self.wait()

    def mend(self) -> None:
        """Make every node run again: thawed, and restarted where it is gone."""
        for node in self.nodes:
            if node.running:
                node.thaw()
            else:
                node.launch()
        self.wait()

    def stop(self) -> None:
        """End every node in an orderly way, all at once: the last of three has no quorum."""
        for node in self.nodes:
            node.ask_to_end()
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        """SIGKILL every node."""
        for node in self.nodes:
            node.kill()

    def _answering(self) -> set[int]:
        try:
            with self.access.admin() as admin:
                return set(running_brokers(admin))
        except (StoreError, KafkaError):
            return set()

    def _cluster_id(self) -> str:
        """The stored id, or a drawn one."""
        file = self._directory / "cluster-id"
        if not file.exists():
            # One that begins with a dash would look like an option to the tools.
            drawn = "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
            file.write_text(drawn)
        return file.read_text()


@contextlib.contextmanager
def running_kafka(
    directory: Path,
    *,
    nodes: int = 1,
    scram: Scram | None = None,
    proxied: bool = False,
    extra: Mapping[str, str] | None = None,
    jvm: Sequence[str] = QUICK_JVM,
) -> Iterator[Kafka]:
    """A cluster on free ports that answers; at the end it is killed and its data removed.

    With `proxied`, clients and brokers reach each node through a proxy that can be cut and slowed.
    """
    archive_classes()
    ports = [
        Ports(
            client=free_port(),
            controller=free_port(),
            advertised=free_port() if proxied else None,
        )
        for _ in range(nodes)
    ]
    kafka = Kafka(directory, ports=ports, scram=scram, extra=extra, jvm=jvm)
    with contextlib.ExitStack() as stack:
        for own in ports:
            if own.advertised is not None:
                proxy = running_proxy(own.advertised, own.client)
                kafka.proxies.append(stack.enter_context(proxy))
        try:
            kafka.start()
            yield kafka
        finally:
            kafka.kill()
            shutil.rmtree(directory, ignore_errors=True)


def archive_classes() -> None:
    """Have one broker write down the classes it loads, so that all others start in half the time.

    Once for every version of the jars and of Java.
    """
    archive = class_archive(_java_program())
    resolve_jars()
    with alone(), tempfile.TemporaryDirectory() as name:
        if archive.exists():
            return
        written = archive.with_suffix(".new")
        kafka = Kafka(
            Path(name),
            ports=[Ports(client=free_port(), controller=free_port())],
            jvm=(*QUICK_JVM, f"-XX:ArchiveClassesAtExit={written}"),
        )
        kafka.start()
        kafka.stop()
        # One that was killed because it took too long has written none, and nobody needs one.
        if written.exists():
            written.rename(archive)


def _java_program() -> Path:
    java = JAVA.find()
    if java is None:
        raise RuntimeError(f"{JAVA.name} is missing; run make services")
    return java


def _java(jvm: Sequence[str], main: str) -> list[str]:
    java = _java_program()
    archive = class_archive(java)
    # A Java that cannot use the archive starts without it.
    shared = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
    return [str(java), *shared, *jvm, "-cp", f"{jars_directory()}/*", main]
