from .group import Processes as Processes
from .group import ProcessLost as ProcessLost
from .group import alone as alone
from .group import current as current
from .joining import joined as joined
from .joining import started_by_many as started_by_many
