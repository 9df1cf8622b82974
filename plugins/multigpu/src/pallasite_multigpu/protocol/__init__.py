"""What communicating kernels do to meet: who they are, where buffers of peers are, traps.

Rules call these functions; the lifecycle (:mod:`.lifecycle`) emits the barriers and the exchange at
the kernel's beginning and end, if there is anything to exchange.
"""

from __future__ import annotations

from pallasite_multigpu.protocol.kernel import communicates as communicates
from pallasite_multigpu.protocol.kernel import device_count as device_count
from pallasite_multigpu.protocol.kernel import is_manual as is_manual
from pallasite_multigpu.protocol.kernel import mesh as mesh
from pallasite_multigpu.protocol.kernel import multicast_pointer as multicast_pointer
from pallasite_multigpu.protocol.kernel import peer_pointer as peer_pointer
from pallasite_multigpu.protocol.kernel import rank as rank
from pallasite_multigpu.protocol.kernel import trap as trap
from pallasite_multigpu.protocol.layout import Trap as Trap
