"""Copies of a network's weights in host memory, so that they can be read at leisure while training moves on."""

import torch
from torch import Tensor

from relax.megatron.convert import Shards
from relax.megatron.network import Network
from relax.megatron.parallel import Groups


class Staging:
    """`places` copies of this rank's part of a network, allocated once, and process groups of their own to make whole
    tensors of them.

    Reading a place needs no thread but its own, on any rank, and meets no collective of training. A place must not be
    filled while it is read, on any rank. Made by all ranks together; of ranks that hold the same weights (data and
    context parallel), one has a copy. A parameter that another stage exports (a tied output layer) has none.
    """

    def __init__(self, network: Network, places: int) -> None:
        grid, groups = network.grid, Groups.apart()
        held = grid.data_rank == 0 and grid.context_rank == 0
        own = [e.parameter for e in network.table if e.stage == grid.pipeline_rank and e.origin != "copy" and held]
        live = network.shards().tensors
        self._network = network
        self._places = [Shards({name: host_memory(live[name]) for name in own}, groups) for _ in range(places)]

    @torch.no_grad()
    def fill(self, place: int) -> None:
        """Copies the present weights of this rank into `place`; they may change as soon as it returns."""
        live = self._network.shards().tensors
        for name, copy in self._places[place].tensors.items():
            copy.copy_(live[name], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def __getitem__(self, place: int) -> Shards:
        """What `place` was filled with last."""
        return self._places[place]


def host_memory(tensor: Tensor) -> Tensor:
    """Contiguous host memory for a copy, its pages in place: the first touch of a page costs many times the copy."""
    pin = torch.cuda.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).zero_()
