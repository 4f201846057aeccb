"""The one policy for layers with statistics over records."""

import pytest
from torch import nn

from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.normalization import refuse_batch_statistics

LAYERS = {
    "batch norm": (nn.BatchNorm1d(3), {"gradients", "updates"}),
    "batch norm, evaluating": (nn.BatchNorm1d(3).eval(), {"updates"}),
    "batch norm without running statistics": (
        nn.BatchNorm2d(3, track_running_stats=False),
        {"gradients", "evaluation"},
    ),
    "batch norm of several processes": (nn.SyncBatchNorm(3), {"gradients", "updates"}),
    "instance norm with running statistics": (
        nn.InstanceNorm1d(3, track_running_stats=True),
        {"gradients", "updates"},
    ),
    "instance norm": (nn.InstanceNorm1d(3, affine=True), set()),
    "group norm": (nn.GroupNorm(1, 3), set()),
    "layer norm": (nn.LayerNorm(3), set()),
}


@pytest.mark.parametrize("use", ["gradients", "evaluation", "updates"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_refused_for_each_use(name, use):
    layer, refused = LAYERS[name]
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer))
    if use not in refused:
        refuse_batch_statistics(model, use)
        return
    with pytest.raises(InvalidInput, match=rf"layer 1\.0 \({type(layer).__name__}\).*nn\.GroupNorm"):
        refuse_batch_statistics(model, use)
