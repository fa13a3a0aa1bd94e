"""Parts of a run's page: text that HTML takes literally, numbers, and the pictures."""

import base64
import html
import os
import re
from typing import Any

from lab import links

PICTURES, PICTURE_BYTES = 8, 4 << 20          # at most this many, each at most so large


def text(value: Any) -> str:
  """Any value as text that HTML takes literally, within quotes too."""
  return html.escape(str(value).encode('utf-8', 'replace').decode())


def number(value: Any) -> str:
  """0.123456 -> '0.1235', 12000 -> '12,000', None -> 'not finite'."""
  if not isinstance(value, (int, float)) or isinstance(value, bool):
    return 'not finite' if value is None else text(value)
  return f'{value:,.0f}' if float(value).is_integer() and abs(value) < 1e15 else f'{value:.4g}'


def missing(what: str) -> str:
  """The sentence for a part that has nothing to show."""
  return f'<p class="missing">{what}</p>'


def pictures(workdir: str) -> str:
  """The newest evaluation's pictures and texts as HTML, each beside the first one of the same name."""
  folder, steps = os.path.join(workdir, 'pictures'), {}
  for file in sorted(os.listdir(folder)) if os.path.isdir(folder) and not os.path.islink(folder) else ():
    if m := re.fullmatch(r'(\d{1,18})_(.+)\.(?:png|gif|txt)', file, re.DOTALL):
      steps.setdefault(m[2], {})[int(m[1])] = file
  newest = max((step for one in steps.values() for step in one), default=0)
  names = [name for name in steps if newest in steps[name]]
  shown, count = '', 0
  for name in names[:PICTURES]:
    cells = ''
    for step in dict.fromkeys((min(steps[name]), newest)):
      data, count, kind = _picture(os.path.join(folder, steps[name][step])), count + 1, steps[name][step][-3:]
      if not data:
        image = missing(f'no complete {kind.upper()}, or too large')
      elif kind == 'txt':
        image = f'<pre>{text(data.decode("utf-8", "replace"))}</pre>'
      else:
        image = (f'<a href="#picture{count}"><img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" '
                 f'alt="{text(name)} at step {step}"></a>')
      cells += (f'<div id="picture{count}">{image}<span>step {number(step)}</span>'
                '<a class="close" href="#pictures">close</a></div>')
    shown += f'<div><span class="name">{text(name)}</span><div class="pair">{cells}</div></div>'
  if not shown:
    return missing('No pictures: the folder pictures is missing or has none.')
  first = 'Left: the first evaluation; right: the newest. ' if count > len(names[:PICTURES]) else ''
  more = f' {len(names) - PICTURES} more are in the folder pictures.' if len(names) > PICTURES else ''
  return f'<p class="soft">{first}A click enlarges.{more}</p><div class="pictures">{shown}</div>'


def _picture(path):
  """The bytes of a whole PNG, GIF or text file, as it is named; b'' for a link, what is cut off or is too large."""
  try:
    data = links.read(path, PICTURE_BYTES)
  except OSError:
    return b''
  if path.endswith('.txt'):
    return data
  png = data.startswith(b'\x89PNG\r\n\x1a\n') and data[12:16] == b'IHDR' and data[-8:-4] == b'IEND'
  gif = data.startswith((b'GIF87a', b'GIF89a')) and data.endswith(b';')
  return data if (png if path.endswith('.png') else gif) else b''
