"""Anthropic's Messages API, as a translation: its bodies become chats, and what a chat gives becomes its blocks."""
