"""OpenAI's Responses API without a memory, as a translation: its items become a chat, and a chat's output its items."""
