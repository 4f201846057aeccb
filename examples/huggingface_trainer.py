"""A Transformer under a budget, by Hugging Face's Trainer
=======================================================

``python examples/huggingface_trainer.py`` needs transformers and accelerate. The Trainer calls backward() itself, so
``make_private(..., trust_loop=True)`` trusts it: each batch goes through the model once, and the loss is the mean over
the batch of each record's own. The model is a small BERT with random weights, and the records are made up.
"""

import tempfile
import warnings

import torch
from torch.utils.data import DataLoader, default_collate
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from matrixdp import Budget
from matrixdp.learn import make_private

LENGTH, WORDS = 12, 40


def sentences(records, seed):
    """Sequences of words; the label says whether words of the upper half are more frequent."""
    torch.manual_seed(seed)  # not of the noise, which is drawn in secret
    upper = torch.rand(records, LENGTH) < 0.2 + 0.6 * torch.randint(2, (records, 1))
    words, labels = upper * WORDS // 2 + torch.randint(WORDS // 2, upper.shape), (upper.sum(1) > LENGTH / 2).long()
    places = torch.arange(LENGTH)  # given for each record: the model would look them up once for the whole batch
    return [{"input_ids": w, "position_ids": places, "labels": y} for w, y in zip(words, labels, strict=True)]


def network():
    """Without dropout: the Trainer sets torch's seed, so the masks would be known."""
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": LENGTH}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, **size, **fixed))


def main(records=4000, *, batch_size=400, epochs=12, budget=Budget(8.0, 1e-5)):  # noqa: B008
    """Trains, prints what was spent, and returns the accuracy on other records with the trainer."""
    loader, model = DataLoader(sentences(records, seed=1), batch_size=batch_size), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    with warnings.catch_warnings(action="ignore"):  # it says that batches are sampled anew
        made = make_private(model, optimizer, loader, budget=budget, clip=0.5, epochs=epochs, trust_loop=True)
    model, optimizer, private = made
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:  # nothing is logged: losses are private
        arguments = TrainingArguments(folder, num_train_epochs=epochs, max_grad_norm=0.0, use_cpu=True, **quiet)
        trainer = Trainer(model, arguments, train_dataset=loader.dataset, optimizers=(optimizer, schedule))
        trainer.get_train_dataloader = lambda: private  # Poisson batches in place of shuffled ones
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    others = default_collate(sentences(1000, seed=2))
    found = float((model.eval()(**others).logits.argmax(1) == others["labels"]).float().mean())
    print(private.trainer, f"accuracy on other records: {found:.3f}", sep="\n")
    return found, private.trainer


if __name__ == "__main__":
    main()
