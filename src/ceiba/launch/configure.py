"""From flags to the final configuration: opens the checkpoint's header, measures the machine, resolves. Shared by
``ceiba serve`` and ``ceiba.Engine``; it must never import torch.
"""

from __future__ import annotations

import os
import secrets

from ceiba.config.choose import requested_device
from ceiba.config.env import Env, read_env
from ceiba.config.flags import Flags
from ceiba.config.records import Config
from ceiba.config.resolve import resolve
from ceiba.core.errors import ConfigError


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
    _check_revision(named, flags.get("revision"))
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


def _check_revision(named: str | None, revision: str | None) -> None:
    """--revision means something for models of the hub only."""
    from ceiba.checkpoint.catalogue import find

    if revision is None:
        return
    if named is None or os.path.exists(os.path.expanduser(named)) or find(named) is not None:
        what = "the embedded model" if named is None else named
        raise ConfigError(
            f"--revision {revision}: {what} has no revisions, only models of the hub do. Leave it out.",
            param="--revision",
        )
