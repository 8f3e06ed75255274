"""What every test shares: one hypothesis profile, one torch thread, no network model hubs."""

import os

import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.services.skips", "tests.services.fixtures"]

# A busy machine is not a failing test. CI tries the same examples every time, so that a change
# fails for what it changed; everybody else's runs look for new ones.
settings.register_profile(
    "draftkeep",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("draftkeep")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
