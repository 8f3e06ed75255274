"""`make kafka`: the tests' broker for a person, until Ctrl-C; its data stays where it was put."""

import argparse
import sys
import time
from pathlib import Path

from tests.services.broker_properties import Ports
from tests.services.jars import kafka_needs, resolve_jars
from tests.services.kafka import Kafka
from tests.services.needs import INSTALL, missing
from tests.services.processes import free_port, listens


def main() -> None:
    """Start the brokers, say where they are, and stop them in an orderly way at Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make kafka", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("draftkeep-kafka"))
    parser.add_argument("--port", type=int, default=9092, help="the first broker's; others follow")
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 3))
    options = parser.parse_args()
    lacking = ", ".join(need.name for need in missing(kafka_needs()))
    if lacking:
        sys.exit(f"{lacking} missing; run {INSTALL}")
    wanted = range(options.port, options.port + options.nodes)
    taken = [port for port in wanted if listens(port)]
    if taken:
        sys.exit(f"port {taken[0]} is taken; choose another, as in make kafka ARGS='--port 19092'")
    ports = [Ports(client=port, controller=free_port()) for port in wanted]
    kafka = Kafka(options.directory.resolve(), ports=ports)
    resolve_jars()
    kafka.start()
    try:
        print(f"Kafka answers at {kafka.bootstrap}; data in {options.directory}; Ctrl-C stops it")
        while all(node.running for node in kafka.nodes):
            time.sleep(0.5)
        sys.exit(f"a broker ended; see {options.directory}/node-*/broker.log")
    except KeyboardInterrupt:
        print("stopping")
    finally:
        kafka.stop()


if __name__ == "__main__":
    main()
