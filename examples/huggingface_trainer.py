"""A Transformer under a budget, by Hugging Face's Trainer
=======================================================

The Trainer's loop stays as it is.

`python examples/huggingface_trainer.py` needs transformers and accelerate. The Trainer calls backward() itself, so
`make_private(..., trust_loop=True)` trusts it: each batch goes through the model once, and the loss is the mean over
the batch of each record's own. Both hold for sequence classification as it is set up here. The model is a small BERT
with random weights, and the records are made up, so nothing is downloaded.
"""

import tempfile
import warnings

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from matrixdp import Budget
from matrixdp.learn import make_private

LENGTH, WORDS = 12, 40


class Sentences(Dataset):
    """Sequences of words; the label says whether words of the upper half are more frequent."""

    def __init__(self, records, seed):
        generator = torch.Generator().manual_seed(seed)
        upper = torch.randint(0, 2, (records, 1), generator=generator)
        often = torch.rand(records, LENGTH, generator=generator) < 0.8
        half = torch.where(often, upper, 1 - upper)
        self.words = half * WORDS // 2 + torch.randint(0, WORDS // 2, (records, LENGTH), generator=generator)
        self.labels = (half.sum(1) > LENGTH / 2).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        # Places are given for each record: left out, the model would look them up once for the whole batch.
        places = torch.arange(LENGTH)
        return {"input_ids": self.words[index], "position_ids": places, "labels": self.labels[index]}


class PrivateTrainer(Trainer):
    """A Trainer that draws its batches from a private loader."""

    def __init__(self, *args, private_loader, **kwargs):
        super().__init__(*args, **kwargs)
        self.private_loader = private_loader

    def get_train_dataloader(self):
        """Poisson batches in place of shuffled ones."""
        return self.private_loader


def network():
    """Without dropout: the Trainer sets torch's seed, so the masks would be known."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def accuracy(model, data):
    """The share of records that the model puts into the right class."""
    model.eval()
    places = torch.arange(LENGTH).expand(len(data), LENGTH)
    with torch.no_grad():
        found = model(input_ids=data.words, position_ids=places).logits.argmax(1)
    return float((found == data.labels).float().mean())


def main(records=4000, *, batch_size=400, epochs=12, budget=Budget(8.0, 1e-5)):  # noqa: B008
    """Trains, prints what was spent, and returns the accuracy on other records with the trainer."""
    torch.manual_seed(0)  # of the first weights
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(Sentences(records, seed=1), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="make_private takes data set")
        model, optimizer, private = make_private(
            model, optimizer, loader, budget=budget, clip=0.5, epochs=epochs, trust_loop=True
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            max_grad_norm=0.0,  # records are clipped, one by one
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",  # the training loss is private, so nothing prints it
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = PrivateTrainer(
            model, arguments, train_dataset=loader.dataset, optimizers=(optimizer, schedule), private_loader=private
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    found = accuracy(model, Sentences(1000, seed=2))
    print(private.trainer)
    print(f"accuracy on other records: {found:.3f}")
    return found, private.trainer


if __name__ == "__main__":
    main()
