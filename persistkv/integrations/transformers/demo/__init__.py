"""The demo ``persistkv demo``: a process answers prompts and is killed; the next process answers with restored KV."""
