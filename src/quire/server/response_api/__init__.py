"""/v1/responses: OpenAI's newer interface for answers, translated to that of chats. Nothing is stored."""
