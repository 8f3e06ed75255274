"""The warm process of a campaign: run as a module, it forks the roles (see `forking`)."""

import functools
import json
import sys
from typing import Any

from draftkeep.config import Config
from tests.crash.campaign.plants import PLANTS
from tests.crash.campaign.points import install
from tests.crash.campaign.roles import ROLES
from tests.crash.campaign.site import node_config
from tests.crash.forking import Child, serve_forks


def _start(role: str, config: Config, planted: str, child: Child) -> None:
    if role in ("node", "forward"):
        config = node_config(config, child.request["number"])
    install(role, child)
    PLANTS[planted]()
    ROLES[role](config, child)


def main(arguments: dict[str, Any]) -> None:
    """`arguments`: the shared configuration, the fault that is planted and a seed."""
    config = Config.model_validate(arguments["config"])
    serve_forks(
        {role: functools.partial(_start, role, config, arguments["planted"]) for role in ROLES},
        {},
        seed=arguments["seed"],
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
