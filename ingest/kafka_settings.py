"""What brokers and topics are set to, defaults included."""

from typing import Any

from kafka.admin import ConfigResource
from kafka.errors import KafkaError

from draftkeep.errors import StoreError


def topic_settings_of(admin: Any, name: str) -> dict[str, str]:
    """Every setting of the topic. Raises StoreError where it is not there or may not be read."""
    return _settings(admin, "TOPIC", name)


def broker_settings(admin: Any) -> dict[int, dict[str, str]]:
    """Every setting of each broker that runs, by its id. Raises StoreError as above.

    One that is down cannot be asked, and is left out.
    """
    try:
        # The library lists those as well that the cluster has given up.
        brokers = [
            broker["broker_id"]
            for broker in admin.describe_cluster()["brokers"]
            if not broker.get("is_fenced", False)
        ]
    except KafkaError as error:
        raise StoreError(
            f"the brokers cannot be listed ({type(error).__name__}); check that they answer"
        ) from error
    return {broker: _settings(admin, "BROKER", str(broker)) for broker in brokers}


def _settings(admin: Any, kind: str, name: str) -> dict[str, str]:
    try:
        answer = admin.describe_configs([ConfigResource(kind, name)], config_filter="all")
    except KafkaError as error:
        raise StoreError(
            f"the settings of {kind.lower()} {name} cannot be read ({type(error).__name__}: "
            f"{error}); check that it exists, and that this user may DESCRIBE_CONFIGS"
        ) from error
    entries = answer[kind.lower()][name]
    return {key: str(entry["value"]) for key, entry in entries.items()}
