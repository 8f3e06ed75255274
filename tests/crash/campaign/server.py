"""The warm process of a campaign: run as a module, it forks the roles (see `forking`)."""

import functools
import json
import os
import sys
from typing import Any

from draftkeep.config import Config
from draftkeep.errors import DraftkeepError
from tests.crash.campaign.plants import PLANTS
from tests.crash.campaign.points import install
from tests.crash.campaign.roles import ROLES
from tests.crash.campaign.site import node_config
from tests.crash.forking import Child, serve_forks

GAVE_UP = 3


def _start(role: str, config: Config, planted: str, child: Child) -> None:
    if role in ("node", "forward"):
        config = node_config(config, child.request["number"])
    install(role, child)
    PLANTS[planted]()
    try:
        ROLES[role](config, child)
    except DraftkeepError as error:
        # What a command ends with, for its supervisor to start it again.
        print(f"{role} gave up: {error}", flush=True)
        os._exit(GAVE_UP)


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
