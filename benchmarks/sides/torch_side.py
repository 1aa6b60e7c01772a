"""transformers (and PEFT) on torch's CPU build: attention by ``scaled_dot_product_attention``, fused AdamW."""

from __future__ import annotations

import peft
import torch
import transformers

from sides.common import peak_rss, serve, task, vocabulary_of


def main() -> None:
    t = task()
    torch.set_num_threads(t.threads)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        t.model, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )
    if t.mode == "lora":
        adapter = peft.LoraConfig(
            r=t.rank, lora_alpha=2 * t.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapter)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=t.learning_rate, weight_decay=0.0, fused=True)
    batches = iter(torch.from_numpy(t.tokens(vocabulary_of(t.model))).long())

    def step() -> float:
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, t.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    ready = {"versions": versions, "trainable": sum(p.numel() for p in trained), "rss": peak_rss()}
    serve(ready, step, {})


if __name__ == "__main__":
    main()
