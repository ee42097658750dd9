"""Chat templates in the style of published models: the constructs that they use, shortened."""

LLAMA31 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- "\\n\\n" }}
{%- endfor %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message["content"] is defined %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TRAINED = """{% for message in messages %}{% set seen = 'outside' %}{% if message.role == 'assistant' %}{% generation %}{% set seen = 'inside' %}{{ message.content }}{{ seen }}{{ eos_token }}{% endgeneration %}{% elif message.role == 'tool' %}{% continue %}{% else %}{{ message.content | upper | replace('A', 'b') }}{% endif %}{{ seen }}{% if loop.index > 6 %}{% break %}{% endif %}{% endfor %}{{ documents | tojson(sort_keys=True) if documents }}{{ dict(a=1, b=messages|length) | tojson(separators=(',', ':')) }}"""

HERMES = "<tools>{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}</tools>" + SMOLLM2
RAG = "{% for d in documents %}{{ d.title | title }}: {{ d.text | wordwrap(20) | indent(2) }}\n{% endfor %}" + SMOLLM2

# They join the arguments of calls as text; the first two ask whether a content is none.
DEEPSEEK_V3 = """{% set ns = namespace(first=false) %}{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.first = true %}{%- for tool in message['tool_calls'] %}{%- if ns.first %}{{ '<|Assistant|><|tool_calls_begin|>' }}{%- set ns.first = false %}{%- endif %}{{ '<|tool_call_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] + '\n' + '```json' + '\n' + tool['function']['arguments'] + '\n' + '```' + '<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_end|>' }}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- set content = message['content'] %}{{ '<|Assistant|>' + content + eos_token }}{%- endif %}{%- if message['role'] == 'tool' %}{{ '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' }}{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}{# tools #}"""
DEEPSEEK_R1 = """{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- for tool in message['tool_calls'] %}{%- if message['content'] is none %}{{ '<|Assistant|><call>' + tool['function']['name'] + '\n' + tool['function']['arguments'] }}{%- else %}{{ '<|Assistant|>' + message['content'] + '<call>' + tool['function']['name'] + '\n' + tool['function']['arguments'] }}{%- endif %}{%- endfor %}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{{ '<|Assistant|>' + message['content'] + eos_token }}{%- endif %}{%- if message['role'] == 'tool' %}{{ '<out>' + message['content'] }}{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}{# tools #}"""
DEEPSEEK_V31 = """{%- for message in messages %}{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}{{ '<|Assistant|></think>' }}{%- for tool in message['tool_calls'] %}{%- if message['content'] == none or message['content'] == '' %}{{ '<call>' + tool['function']['name'] + '<|tool_sep|>' + tool['function']['arguments'] }}{%- else %}{{ message['content'] + '<call>' + tool['function']['name'] + tool['function']['arguments'] }}{%- endif %}{%- endfor %}{%- else %}{{ '<' + message['role'] + '>' + message['content'] }}{%- endif %}{%- endfor %}{# tools #}"""
JOINED = {"v3": DEEPSEEK_V3, "r1": DEEPSEEK_R1, "v3.1": DEEPSEEK_V31}

ALL = {"llama 3.1": LLAMA31, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA, "smollm2": SMOLLM2, "trained": TRAINED}
NAMED = {"default": SMOLLM2, "tool_use": HERMES, "rag": RAG}
