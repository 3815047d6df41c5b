"""From flags to the final configuration: opens the checkpoint's header, measures the machine, resolves. Shared by
``ceiba serve`` and ``ceiba.Engine``; it must never import torch.
"""

from __future__ import annotations

import secrets

from ceiba.config.choose import requested_device
from ceiba.config.env import Env, read_env
from ceiba.config.flags import Flags
from ceiba.config.records import Config
from ceiba.config.resolve import resolve


def configure(flags: Flags, env: Env | None = None, *, progress: bool = True) -> Config:
    """Decide everything for ``flags`` on this machine; fetches the model where it is not here yet.

    Raises ConfigError (CheckpointError for the model) with the way out.
    """
    env = read_env() if env is None else env
    kind, gpu_id = requested_device(flags)

    from ceiba.launch.facts import device_facts

    device = device_facts(kind, gpu_id, visible_gpus=env.visible_gpus)

    from ceiba.checkpoint import open_checkpoint
    from ceiba.checkpoint.catalogue import DEFAULT

    named = flags.get("model_path")
    checkpoint = open_checkpoint(
        named,
        flags.get("load_format"),
        download_dir=flags.get("download_dir"),
        revision=flags.get("revision"),
        progress=progress,
    )
    try:
        flags = flags.filled(random_seed=secrets.randbits(31))
        return resolve(flags, checkpoint.facts(), device, env, path=checkpoint.path, name=named or DEFAULT.name)
    finally:
        checkpoint.close()
