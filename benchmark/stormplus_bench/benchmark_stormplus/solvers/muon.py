from torch import nn
from torch.optim import AdamW, Muon

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import TwoOptimizers


def hidden_matrices(model):
    """Return the trainable matrices except embeddings and the last one, the output layer's."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    return [p for p in matrices[:-1] if id(p) not in embeddings]


class Solver(TorchSolver):
    """torch.optim.Muon on hidden matrices, AdamW on the rest.

    Muon's rate is scaled to match AdamW's, so that both have the same lr.
    """

    name, label = "muon", "Muon"
    default_lr = 1e-3
    test_config = {"dataset": {"name": "digits"}}

    def reason_to_skip(self, workload):
        return None if hidden_matrices(workload.model(0)) else "the model has no hidden matrix"

    def stepper(self, training, lr):
        hidden = hidden_matrices(training.model)
        ids = set(map(id, hidden))
        rest = [p for p in training.parameters if id(p) not in ids]
        muon = Muon(hidden, lr, adjust_lr_fn="match_rms_adamw")
        return TwoOptimizers(AdamW(rest, lr), muon)
