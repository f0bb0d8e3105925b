"""What vLLM's own parsers read in answers. By the python of vLLM's own:

    .venv-vllm/bin/python tests/vllm/read_text.py REQUEST.json ANSWER.json

REQUEST: [{"parser": kimi | hermes | llama, "tokenizer": folder, "text", "args": template_args, "tools"}]
ANSWER: [[thought or null, content or null, [[name, arguments as JSON text]]]]
"""

import json
import os
import sys
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@cache
def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def read(parser, tokenizer, text, args, tools):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.kimi_k2 import KimiK2Parser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    tokenizer = tokenizer_of(tokenizer)
    asked = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice="auto" if tools else None
    )
    if parser == "kimi":
        ids = tokenizer.encode(text, add_special_tokens=False)
        kimi = KimiK2Parser(tokenizer, None, chat_template_kwargs=args)
        thought, content, calls = kimi.parse(text, asked, enable_auto_tools=True, model_output_token_ids=ids)
        return thought, content, [(call.name, call.arguments) for call in calls or []]
    tool_parser = {"hermes": Hermes2ProToolParser, "llama": Llama3JsonToolParser}[parser](tokenizer, None)
    found = tool_parser.extract_tool_calls(text, asked)
    return None, found.content, [(call.function.name, call.function.arguments) for call in found.tool_calls]


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps([read(**one) for one in json.loads(request.read_text(encoding="utf-8"))]))
