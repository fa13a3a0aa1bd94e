"""What a user would run instead of configs/cola.py and sst2.py: fine-tuning by transformers and PyTorch on one GPU.

    python benchmarks/transformers_finetune.py sst2 RAW_DIR MODEL_DIR [--epochs=3] [--rate=3e-5] [--batch=64] [--seed=0]

RAW_DIR has the raw files that `data_pipelines.prepare` takes; MODEL_DIR a BERT's model.safetensors and config.json, and
its vocabulary as vocab.txt. Eager bfloat16 autocast, fused AdamW (decay .01, not of biases and norms), a linear
schedule with 6 % of warm-up, clipping at 1, batches padded to their longest sentence. One JSON line: the scores on
GLUE's dev set after each epoch, seconds of the loop, and of the whole program.
"""

import time

START = time.time()

import argparse      # noqa: E402
import csv           # noqa: E402
import json          # noqa: E402
import os            # noqa: E402

import torch         # noqa: E402
from transformers import BertForSequenceClassification, BertTokenizerFast      # noqa: E402


def read(path: str, text: int, label: int, header: bool) -> tuple[list[str], torch.Tensor]:
  """Sentences and labels of a file of tabs, whose quotes are characters like others."""
  with open(path, encoding='utf-8', newline='') as f:
    rows = list(csv.reader(f, delimiter='\t', quoting=csv.QUOTE_NONE))[header:]
  return [r[text].strip() for r in rows], torch.tensor([int(r[label]) for r in rows])


def data(task: str, folder: str):
  """Training and dev sets."""
  if task == 'sst2':
    return [read(os.path.join(folder, f'{name}.tsv'), 0, 1, True) for name in ('train', 'dev')]
  train, first, second = (read(os.path.join(folder, f'{name}.tsv'), 3, 1, False)
                          for name in ('in_domain_train', 'in_domain_dev', 'out_of_domain_dev'))
  return train, (first[0] + second[0], torch.cat([first[1], second[1]]))


def batches(tokenizer, texts, labels, order, size):
  """Tensors on the GPU, a batch at a time."""
  for i in range(0, len(order), size):
    chosen = order[i:i + size].tolist()
    found = tokenizer([texts[j] for j in chosen], padding=True, truncation=True, max_length=64, return_tensors='pt')
    yield {k: v.cuda(non_blocking=True) for k, v in found.items()}, labels[chosen].cuda()


@torch.no_grad()
def score(model, tokenizer, texts, labels) -> dict[str, float]:
  """Accuracy and Matthews' correlation."""
  model.eval()
  found = []
  for inputs, _ in batches(tokenizer, texts, labels, torch.arange(len(texts)), 256):
    with torch.autocast('cuda', torch.bfloat16):
      found.append(model(**inputs).logits.float().argmax(-1).cpu())
  model.train()
  guess = torch.cat(found)
  tp, tn = ((guess == 1) & (labels == 1)).sum().item(), ((guess == 0) & (labels == 0)).sum().item()
  fp, fn = ((guess == 1) & (labels == 0)).sum().item(), ((guess == 0) & (labels == 1)).sum().item()
  below = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))**0.5
  return {'accuracy': (tp + tn) / len(guess), 'mcc': (tp * tn - fp * fn) / below if below else 0.0}


def arguments():
  parser = argparse.ArgumentParser()
  parser.add_argument('task', choices=('sst2', 'cola'))
  parser.add_argument('raw_dir')
  parser.add_argument('model_dir')
  parser.add_argument('--epochs', type=int, default=3)
  parser.add_argument('--rate', type=float, default=3e-5)
  parser.add_argument('--batch', type=int, default=64)
  parser.add_argument('--seed', type=int, default=0)
  return parser.parse_args()


def optimization(model, rate: float, total: int):
  """AdamW and its schedule over so many updates."""
  plain = [p for n, p in model.named_parameters() if n.endswith('bias') or 'LayerNorm' in n]
  others = [p for n, p in model.named_parameters() if not (n.endswith('bias') or 'LayerNorm' in n)]
  optimizer = torch.optim.AdamW([{'params': others, 'weight_decay': 0.01}, {'params': plain, 'weight_decay': 0.0}],
                                lr=rate, fused=True)
  warm = int(0.06 * total)
  return optimizer, torch.optim.lr_scheduler.LambdaLR(
      optimizer, lambda i: (i + 1) / warm if i < warm else max(0.0, (total - i) / (total - warm)))


def main():
  args = arguments()
  torch.manual_seed(args.seed)
  (texts, labels), dev = data(args.task, args.raw_dir)
  tokenizer = BertTokenizerFast(os.path.join(args.model_dir, 'vocab.txt'))
  model = BertForSequenceClassification.from_pretrained(args.model_dir, num_labels=2).cuda().train()
  total = args.epochs * -(-len(texts) // args.batch)
  optimizer, schedule = optimization(model, args.rate, total)
  begin, scores = time.time(), []
  for _ in range(args.epochs):
    for inputs, wanted in batches(tokenizer, texts, labels, torch.randperm(len(texts)), args.batch):
      with torch.autocast('cuda', torch.bfloat16):
        loss = model(**inputs, labels=wanted).loss
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      schedule.step()
      optimizer.zero_grad(set_to_none=True)
    scores.append(score(model, tokenizer, *dev))
  end = time.time()
  print(json.dumps({'task': args.task, 'seed': args.seed, 'updates': total, 'scores': scores,
                    'loop_s': round(end - begin, 1), 'program_s': round(end - START, 1)}))


if __name__ == '__main__':
  main()
