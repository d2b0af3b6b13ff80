"""The official client (`pip install openai`) of a cluster: a stream, a form, and a refusal.

pdserve up
python examples/openai_client.py [URL [KEY]]
"""

import json
import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "unused"
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 12 plus 30?"}],
    max_tokens=20,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")

# The sampler enforces the form, so what comes back can be parsed, whatever the model knows.
schema = {
    "type": "object",
    "properties": {"is_even": {"type": "boolean"}, "digit": {"enum": [0, 1, 2]}},
    "required": ["is_even", "digit"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me about the number 42."}],
    max_tokens=200,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "about", "schema": schema}},
)
print(f"about 42: {json.loads(answer.choices[0].message.content)}")

try:
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hot!"}], temperature=3
    )
except openai.BadRequestError as error:
    print(f"refused: {error.message}")
