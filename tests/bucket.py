"""A stand-in for the storage service on this machine: a bucket in memory, as much of the service's HTTP interface as
the lab's clients use, and faults on demand."""

import contextlib
import datetime
import hashlib
import http.server
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
import traceback
import urllib.parse

OBJECT = re.compile(r'/(?:download/)?storage/v1/b/([^/]+)/o(?:/([^/]+)(?:/moveTo/o/([^/]+))?)?')


class Bucket:
  """The service with one empty bucket called `lab`; a context that serves on 127.0.0.1.

  Attributes:
    objects: name -> content.
    seen: (method, name of the object or prefix) of every request.
    faults: [method, part of the name, status, times]: so many requests of this kind are answered with this status,
      or by a reset of the connection where it is 0.
  """

  def __init__(self):
    self.objects: dict[str, bytes] = {}
    self.generations: dict[str, int] = {}
    self.seen: list[tuple[str, str]] = []
    self.faults: list[list] = []
    self.uploads: dict[str, tuple[str, dict, bytearray]] = {}
    self.lock, self.count = threading.RLock(), 0

  def __enter__(self):
    self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _handler(self))
    self.server.daemon_threads = True
    self.server.handle_error = _told
    self.thread = threading.Thread(target=self.server.serve_forever, kwargs={'poll_interval': 0.05})
    self.thread.start()
    self.url = f'http://127.0.0.1:{self.server.server_port}'
    return self

  def __exit__(self, *_):
    self.server.shutdown()
    self.server.server_close()
    self.thread.join()

  @property
  def environment(self) -> dict[str, str]:
    """What makes gcsfs and tensorstore talk to this service, without an account."""
    return {'STORAGE_EMULATOR_HOST': self.url, 'TENSORSTORE_GCS_HTTP_URL': self.url,
            'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'nobody', 'FSSPEC_GS_TOKEN': 'anon', 'FSSPEC_GS_PROJECT': 'none'}

  def proxy(self, folder) -> dict[str, str]:
    """What makes TensorFlow talk to it: that client knows one address, and can only be sent there by a proxy.

    The proxy ends the encryption itself, by a certificate that is made for it and lies in `folder`.
    """
    path = certificate(folder)
    self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    self.tls.load_cert_chain(path)
    return {'https_proxy': self.url, 'CURL_CA_BUNDLE': path, 'GCS_RETRY_CONFIG_INIT_DELAY_TIME_US': '1000'}

  def clear(self) -> None:
    """Back to an empty bucket."""
    with self.lock:
      for state in (self.objects, self.generations, self.seen, self.faults, self.uploads):
        state.clear()

  def fail(self, method: str, name: str, status: int, times: int = 1) -> None:
    """Adds a fault."""
    self.faults.append([method, name, status, times])

  def names(self, prefix: str = '') -> list[str]:
    """The objects whose names begin so."""
    with self.lock:
      return sorted(n for n in self.objects if n.startswith(prefix))

  def put(self, name: str, content: bytes) -> int:
    """Writes an object; returns its generation."""
    with self.lock:
      self.count += 1
      self.objects[name], self.generations[name] = content, self.count
      return self.count

  def fault(self, method, name):
    """The status of the fault that is due; None if none is."""
    with self.lock:
      self.seen.append((method, name))
      for fault in self.faults:
        if fault[0] == method and fault[1] in name and fault[3]:
          fault[3] -= 1
          return fault[2]
    return None


def _told(*_):
  """A client that is gone is no fault of the service; anything else is."""
  if not isinstance(sys.exception(), ConnectionError):
    traceback.print_exc()


def _handler(bucket):
  """The request handler of a bucket."""
  class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
      pass

    def answer(self, status, content=b'', **headers):
      if not isinstance(content, bytes):
        content, headers['Content-Type'] = json.dumps(content).encode(), 'application/json; charset=UTF-8'
      self.send_response(status)
      for key, value in {**headers, 'Content-Length': len(content)}.items():
        self.send_header(key.replace('_', '-'), str(value))
      self.end_headers()
      with contextlib.suppress(BrokenPipeError):
        self.wfile.write(content)

    def error(self, status):
      self.answer(status, {'error': {'code': status, 'message': f'answered {status} on purpose' if status != 404 else
                                     'No such object or bucket'}})

    def do(self):
      url = urllib.parse.urlsplit(self.path)
      query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()}
      body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
      path = url.path.replace('/upload/', '/', 1)
      if path == '/storage/v1/b/lab':
        return self.answer(200, {'kind': 'storage#bucket', 'name': 'lab', 'id': 'lab'})
      plain = re.fullmatch('/lab/(.+)', path)
      if plain:                # the older interface, by which TensorFlow reads contents
        path, query['alt'] = f'/storage/v1/b/lab/o/{urllib.parse.quote(urllib.parse.unquote(plain[1]), safe="")}', 'media'
      match = OBJECT.fullmatch(path)
      if not match:
        return self.error(404)
      where, name, other = (urllib.parse.unquote(x) if x else x for x in match.groups())
      status = bucket.fault(self.command, name or query.get('name') or query.get('prefix') or
                            (_parts(self.headers, body)[0].get('name', '') if body else ''))
      if status == 0:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        self.connection.close()
        self.close_connection = True
        return None
      if status or where != 'lab':
        return self.error(status or 404)
      with bucket.lock:
        if url.path.startswith('/upload/'):
          return self.upload(query, body)
        if name is None:
          return self.answer(200, _listing(bucket, query))
        if name not in bucket.objects:
          return self.error(404)
        if 'ifGenerationMatch' in query and int(query['ifGenerationMatch']) != bucket.generations[name]:
          return self.error(412)
        if other is not None:
          bucket.put(other, bucket.objects.pop(name))
          del bucket.generations[name]
          return self.answer(200, _about(bucket, other))
        if self.command == 'DELETE':
          del bucket.objects[name], bucket.generations[name]
          return self.answer(204)
        return self.download(name) if query.get('alt') == 'media' else self.answer(200, _about(bucket, name))

    def do_CONNECT(self):
      self.answer(200)
      with contextlib.closing(bucket.tls.wrap_socket(self.connection, server_side=True)) as inner:
        Handler(inner, self.client_address, self.server)
      self.close_connection = True

    def upload(self, query, body):
      """Whole objects, whatever way they come."""
      if 'upload_id' in query:
        name, query, content = bucket.uploads[query['upload_id']]
        content += body
        total = self.headers['Content-Range'].rpartition('/')[2]
        if total == '*' or len(content) < int(total):
          return self.answer(308, Range=f'bytes=0-{len(content) - 1}')
        body = bytes(content)
      elif query['uploadType'] == 'media':
        name = query['name']
      else:
        about, content = _parts(self.headers, body)
        name = query.get('name') or about['name']
        if query['uploadType'] == 'resumable':
          key = str(len(bucket.uploads))
          bucket.uploads[key] = name, query, bytearray()
          return self.answer(200, Location=f'{bucket.url}/upload/storage/v1/b/lab/o?uploadType=resumable&upload_id={key}')
        body = content
      if 'ifGenerationMatch' in query and int(query['ifGenerationMatch']) != bucket.generations.get(name, 0):
        return self.error(412)
      bucket.put(name, body)
      return self.answer(200, _about(bucket, name))

    def download(self, name):
      content = bucket.objects[name]
      about = {'x_goog_generation': bucket.generations[name], 'ETag': bucket.generations[name]}
      asked = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
      if not asked:
        return self.answer(200, content, **about)
      first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
      if first > last:
        return self.error(416)
      return self.answer(206, content[first:last + 1], Content_Range=f'bytes {first}-{last}/{len(content)}', **about)

    do_GET = do_POST = do_PUT = do_DELETE = do
  return Handler


def certificate(folder) -> str:
  """A file with a key and a certificate, signed by itself, for the addresses of the service."""
  from cryptography import x509
  from cryptography.hazmat.primitives import hashes, serialization as form
  from cryptography.hazmat.primitives.asymmetric import ec
  key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
  name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'test')])
  hosts = x509.SubjectAlternativeName([x509.DNSName(f'{h}.googleapis.com') for h in ('www', 'storage')])
  made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
          .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
          .add_extension(hosts, False).add_extension(x509.BasicConstraints(True, None), True).sign(key, hashes.SHA256()))
  path = os.path.join(folder, 'service.pem')
  with open(path, 'wb') as f:
    f.write(made.public_bytes(form.Encoding.PEM))
    f.write(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
  return path


def _parts(headers, body):
  """The description and the content of an upload."""
  if 'multipart/' not in headers.get('Content-Type', ''):
    return json.loads(body or b'{}') if 'json' in headers.get('Content-Type', '') else {}, body
  boundary = re.search(r'boundary="?([^";]+)', headers['Content-Type'])[1].encode()
  _, about, content, _ = re.split(rb'(?:\r?\n)?--' + re.escape(boundary) + rb'(?:--)?', body, maxsplit=3)
  about, content = (re.split(rb'\r?\n\r?\n', part, maxsplit=1)[1] for part in (about, content))
  return json.loads(about), content


def _about(bucket, name):
  content = bucket.objects[name]
  return {'kind': 'storage#object', 'bucket': 'lab', 'name': name, 'size': str(len(content)), 'metageneration': '1',
          'generation': str(bucket.generations[name]), 'updated': '2026-01-01T00:00:00.000Z',
          'timeCreated': '2026-01-01T00:00:00.000Z', 'etag': hashlib.md5(content).hexdigest()}


def _listing(bucket, query):
  """Two pages at least where there is more than one object, lest a client forgets the second."""
  prefix, delimiter, after = query.get('prefix', ''), query.get('delimiter'), query.get('pageToken', '')
  start, end = query.get('startOffset', ''), query.get('endOffset')
  entries = {}
  for name in bucket.names(prefix):
    if name >= start and (not end or name < end):
      at = name.find(delimiter, len(prefix)) if delimiter else -1
      entries.setdefault(name if at < 0 else name[:at + 1], at >= 0)
  rest = [e for e in sorted(entries) if e > after]
  page = rest[:max(1, min(len(rest) // 2, int(query.get('maxResults', 1000))))]
  return {'kind': 'storage#objects', 'prefixes': [e for e in page if entries[e]],
          'items': [_about(bucket, e) for e in page if not entries[e]],
          **({'nextPageToken': page[-1]} if len(page) < len(rest) else {})}
