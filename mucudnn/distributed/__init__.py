"""Cooperation of the ranks of a torch.distributed process group: exchange messages, divide work, check agreement.

The folder ``tuning`` decides what is measured and chosen; torch.distributed sends the messages. A process outside any
group does not import torch.distributed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import shown

if TYPE_CHECKING:
    from mucudnn.distributed.team import Team


def team_of(config: Config, group: dist.ProcessGroup | None = None) -> Team | None:
    """Return the team of ranks that tune together, or None if this process tunes for itself.

    group: None for the default group, if initialized. Raises ``InvalidInputError`` if this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise InvalidInputError(f"process_group is {shown(group)}; call torch.distributed.init_process_group first")
        return None
    if not config.share_tuning:
        return None
    from mucudnn.distributed.team import Team

    return Team.of(group)


def propagate_errors(team: Team | None) -> AbstractContextManager[None]:
    """Return a context that sends an error raised in its block to the other ranks of the team, if there is a team."""
    return nullcontext() if team is None else team.propagate_errors()
