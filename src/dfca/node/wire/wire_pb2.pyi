from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    FLOAT64: _ClassVar[DType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FLOAT32: _ClassVar[Encoding]
    ENCODING_FLOAT64: _ClassVar[Encoding]
    ENCODING_BF16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_CODED: _ClassVar[Encoding]
DTYPE_UNSPECIFIED: DType
FLOAT32: DType
FLOAT64: DType
ENCODING_UNSPECIFIED: Encoding
ENCODING_FLOAT32: Encoding
ENCODING_FLOAT64: Encoding
ENCODING_BF16: Encoding
ENCODING_INT8: Encoding
ENCODING_CODED: Encoding

class Frame(_message.Message):
    __slots__ = ("hello", "heartbeat", "roster_digest", "roster_records", "message", "announce", "withdraw", "unavailable", "received", "close", "want", "chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROSTER_RECORDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    heartbeat: Heartbeat
    roster_digest: RosterDigest
    roster_records: RosterRecords
    message: bytes
    announce: Announce
    withdraw: Withdraw
    unavailable: Unavailable
    received: Received
    close: Close
    want: Want
    chunk: Chunk
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., roster_digest: _Optional[_Union[RosterDigest, _Mapping]] = ..., roster_records: _Optional[_Union[RosterRecords, _Mapping]] = ..., message: _Optional[bytes] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., unavailable: _Optional[_Union[Unavailable, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("protocol", "swarm", "model_size", "dtype", "epoch", "software", "parts")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    MODEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    swarm: str
    model_size: int
    dtype: DType
    epoch: int
    software: str
    parts: bool
    def __init__(self, protocol: _Optional[int] = ..., swarm: _Optional[str] = ..., model_size: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., epoch: _Optional[int] = ..., software: _Optional[str] = ..., parts: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number", "echo", "held_us")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    number: int
    echo: int
    held_us: int
    def __init__(self, number: _Optional[int] = ..., echo: _Optional[int] = ..., held_us: _Optional[int] = ...) -> None: ...

class RosterDigest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class RosterRecords(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("number", "message", "name", "size", "encoding", "rows")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    number: int
    message: bytes
    name: bytes
    size: int
    encoding: Encoding
    rows: int
    def __init__(self, number: _Optional[int] = ..., message: _Optional[bytes] = ..., name: _Optional[bytes] = ..., size: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., rows: _Optional[int] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Unavailable(_message.Message):
    __slots__ = ("number", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: str
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("number", "offset", "until")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    until: int
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., until: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("reason", "text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    text: str
    def __init__(self, reason: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    offset: int
    def __init__(self, name: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("dial_back", "summary")
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    dial_back: bool
    summary: bool
    def __init__(self, dial_back: _Optional[bool] = ..., summary: _Optional[bool] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("time_s", "dialled", "summary")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    DIALLED_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    dialled: _containers.RepeatedCompositeFieldContainer[DialBack]
    summary: str
    def __init__(self, time_s: _Optional[float] = ..., dialled: _Optional[_Iterable[_Union[DialBack, _Mapping]]] = ..., summary: _Optional[str] = ...) -> None: ...

class DialBack(_message.Message):
    __slots__ = ("address", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    error: str
    def __init__(self, address: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "offset", "number")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    number: int
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("hello", "update", "nothing", "copy_request", "copy", "bank_request", "bank_copy", "declined", "probe", "count", "refuse", "open", "centre", "bid", "stand", "candidate", "votes", "decision", "alarm", "served", "report", "question", "answer", "result", "curves")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    COPY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    BANK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BANK_COPY_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CENTRE_FIELD_NUMBER: _ClassVar[int]
    BID_FIELD_NUMBER: _ClassVar[int]
    STAND_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    update: Update
    nothing: Nothing
    copy_request: CopyRequest
    copy: Copy
    bank_request: BankRequest
    bank_copy: BankCopy
    declined: Declined
    probe: Probe
    count: Count
    refuse: Refuse
    open: Open
    centre: Centre
    bid: Bid
    stand: Stand
    candidate: Candidate
    votes: Votes
    decision: Decision
    alarm: Alarm
    served: Served
    report: Report
    question: Question
    answer: Answer
    result: Result
    curves: Curves
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., nothing: _Optional[_Union[Nothing, _Mapping]] = ..., copy_request: _Optional[_Union[CopyRequest, _Mapping]] = ..., copy: _Optional[_Union[Copy, _Mapping]] = ..., bank_request: _Optional[_Union[BankRequest, _Mapping]] = ..., bank_copy: _Optional[_Union[BankCopy, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., count: _Optional[_Union[Count, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., centre: _Optional[_Union[Centre, _Mapping]] = ..., bid: _Optional[_Union[Bid, _Mapping]] = ..., stand: _Optional[_Union[Stand, _Mapping]] = ..., candidate: _Optional[_Union[Candidate, _Mapping]] = ..., votes: _Optional[_Union[Votes, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., alarm: _Optional[_Union[Alarm, _Mapping]] = ..., served: _Optional[_Union[Served, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., curves: _Optional[_Union[Curves, _Mapping]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("voters", "attempt", "root", "incarnation", "digest", "slots", "merges", "empty", "last")
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MERGES_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    voters: int
    attempt: int
    root: int
    incarnation: int
    digest: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    merges: _containers.RepeatedCompositeFieldContainer[Merge]
    empty: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    def __init__(self, voters: _Optional[int] = ..., attempt: _Optional[int] = ..., root: _Optional[int] = ..., incarnation: _Optional[int] = ..., digest: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., merges: _Optional[_Iterable[_Union[Merge, _Mapping]]] = ..., empty: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ...) -> None: ...

class Merge(_message.Message):
    __slots__ = ("into", "closed", "share", "worth")
    INTO_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    into: int
    closed: int
    share: float
    worth: float
    def __init__(self, into: _Optional[int] = ..., closed: _Optional[int] = ..., share: _Optional[float] = ..., worth: _Optional[float] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("sender", "stamp", "origin")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    sender: int
    stamp: int
    origin: int
    def __init__(self, sender: _Optional[int] = ..., stamp: _Optional[int] = ..., origin: _Optional[int] = ...) -> None: ...

class ClusterOffer(_message.Message):
    __slots__ = ("cluster", "offer")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    cluster: int
    offer: Offer
    def __init__(self, cluster: _Optional[int] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("sender", "cluster", "round", "degree", "offer", "updates")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    sender: int
    cluster: int
    round: int
    degree: int
    offer: Offer
    updates: int
    def __init__(self, sender: _Optional[int] = ..., cluster: _Optional[int] = ..., round: _Optional[int] = ..., degree: _Optional[int] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., updates: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "round", "clusters", "lineage")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    round: int
    clusters: int
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, incarnation: _Optional[int] = ..., round: _Optional[int] = ..., clusters: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("message", "parts", "lineage", "age_s", "freshness", "offers")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    message: Message
    parts: int
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    age_s: float
    freshness: _containers.RepeatedScalarFieldContainer[int]
    offers: _containers.RepeatedCompositeFieldContainer[ClusterOffer]
    def __init__(self, message: _Optional[_Union[Message, _Mapping]] = ..., parts: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., age_s: _Optional[float] = ..., freshness: _Optional[_Iterable[int]] = ..., offers: _Optional[_Iterable[_Union[ClusterOffer, _Mapping]]] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ("round", "lineage", "freshness", "offers")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    freshness: _containers.RepeatedScalarFieldContainer[int]
    offers: _containers.RepeatedCompositeFieldContainer[ClusterOffer]
    def __init__(self, round: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., freshness: _Optional[_Iterable[int]] = ..., offers: _Optional[_Iterable[_Union[ClusterOffer, _Mapping]]] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("cluster", "lineage")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    cluster: int
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, cluster: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("message", "lineage")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    message: Message
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, message: _Optional[_Union[Message, _Mapping]] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class BankRequest(_message.Message):
    __slots__ = ("clusters",)
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    clusters: Numbers
    def __init__(self, clusters: _Optional[_Union[Numbers, _Mapping]] = ...) -> None: ...

class BankCopy(_message.Message):
    __slots__ = ("message", "round", "clusters", "lineage")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    message: Message
    round: int
    clusters: int
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, message: _Optional[_Union[Message, _Mapping]] = ..., round: _Optional[int] = ..., clusters: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("cluster",)
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    cluster: int
    def __init__(self, cluster: _Optional[int] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("attempt", "decided", "lot", "root", "incarnation")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    LOT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    decided: int
    lot: int
    root: int
    incarnation: int
    def __init__(self, attempt: _Optional[int] = ..., decided: _Optional[int] = ..., lot: _Optional[int] = ..., root: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("lost", "clusters", "closed", "survey")
    LOST_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SURVEY_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    clusters: int
    closed: _containers.RepeatedScalarFieldContainer[int]
    survey: bool
    def __init__(self, lost: _Optional[_Iterable[int]] = ..., clusters: _Optional[int] = ..., closed: _Optional[_Iterable[int]] = ..., survey: _Optional[bool] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("candidate", "accepted", "slot")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    accepted: bool
    slot: int
    def __init__(self, candidate: _Optional[int] = ..., accepted: _Optional[bool] = ..., slot: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("key", "base", "call")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    key: Key
    base: _containers.RepeatedCompositeFieldContainer[Entry]
    call: Call
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., base: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., call: _Optional[_Union[Call, _Mapping]] = ...) -> None: ...

class Poll(_message.Message):
    __slots__ = ("slots", "followers", "samples", "unfit", "voters", "excess")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    EXCESS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    followers: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    unfit: _containers.RepeatedScalarFieldContainer[int]
    voters: _containers.RepeatedScalarFieldContainer[int]
    excess: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., followers: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ..., unfit: _Optional[_Iterable[int]] = ..., voters: _Optional[_Iterable[int]] = ..., excess: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("key", "size", "ready", "log", "poll")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    POLL_FIELD_NUMBER: _ClassVar[int]
    key: Key
    size: int
    ready: int
    log: _containers.RepeatedCompositeFieldContainer[Turn]
    poll: Poll
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., size: _Optional[int] = ..., ready: _Optional[int] = ..., log: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., poll: _Optional[_Union[Poll, _Mapping]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("key", "voters", "log", "first")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    key: Key
    voters: int
    log: _containers.RepeatedCompositeFieldContainer[Turn]
    first: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., voters: _Optional[int] = ..., log: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., first: _Optional[int] = ...) -> None: ...

class Centre(_message.Message):
    __slots__ = ("key", "place", "candidate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    key: Key
    place: int
    candidate: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., place: _Optional[int] = ..., candidate: _Optional[int] = ...) -> None: ...

class Bid(_message.Message):
    __slots__ = ("key", "turn", "value", "candidate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    key: Key
    turn: int
    value: float
    candidate: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., turn: _Optional[int] = ..., value: _Optional[float] = ..., candidate: _Optional[int] = ...) -> None: ...

class Stand(_message.Message):
    __slots__ = ("key", "turn", "candidate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    key: Key
    turn: int
    candidate: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., turn: _Optional[int] = ..., candidate: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("key", "turn", "candidate", "gain")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    key: Key
    turn: int
    candidate: int
    gain: float
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., turn: _Optional[int] = ..., candidate: _Optional[int] = ..., gain: _Optional[float] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("voters", "movers", "samples", "totals", "squares", "followers", "stay_samples", "stay_totals", "stay_squares", "unfit", "unfit_samples", "unfit_totals", "unfit_squares")
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    MOVERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    STAY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STAY_TOTALS_FIELD_NUMBER: _ClassVar[int]
    STAY_SQUARES_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    UNFIT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNFIT_TOTALS_FIELD_NUMBER: _ClassVar[int]
    UNFIT_SQUARES_FIELD_NUMBER: _ClassVar[int]
    voters: int
    movers: int
    samples: int
    totals: _containers.RepeatedScalarFieldContainer[bytes]
    squares: _containers.RepeatedScalarFieldContainer[bytes]
    followers: _containers.RepeatedScalarFieldContainer[int]
    stay_samples: _containers.RepeatedScalarFieldContainer[int]
    stay_totals: _containers.RepeatedScalarFieldContainer[bytes]
    stay_squares: _containers.RepeatedScalarFieldContainer[bytes]
    unfit: _containers.RepeatedScalarFieldContainer[int]
    unfit_samples: _containers.RepeatedScalarFieldContainer[int]
    unfit_totals: _containers.RepeatedScalarFieldContainer[bytes]
    unfit_squares: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, voters: _Optional[int] = ..., movers: _Optional[int] = ..., samples: _Optional[int] = ..., totals: _Optional[_Iterable[bytes]] = ..., squares: _Optional[_Iterable[bytes]] = ..., followers: _Optional[_Iterable[int]] = ..., stay_samples: _Optional[_Iterable[int]] = ..., stay_totals: _Optional[_Iterable[bytes]] = ..., stay_squares: _Optional[_Iterable[bytes]] = ..., unfit: _Optional[_Iterable[int]] = ..., unfit_samples: _Optional[_Iterable[int]] = ..., unfit_totals: _Optional[_Iterable[bytes]] = ..., unfit_squares: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Votes(_message.Message):
    __slots__ = ("key", "turn", "tally")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    turn: int
    tally: Tally
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., turn: _Optional[int] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("key", "turn", "outcome", "done")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    key: Key
    turn: int
    outcome: Turn
    done: bool
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., turn: _Optional[int] = ..., outcome: _Optional[_Union[Turn, _Mapping]] = ..., done: _Optional[bool] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("key", "followers", "partners")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    PARTNERS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    followers: _containers.RepeatedScalarFieldContainer[int]
    partners: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., followers: _Optional[_Iterable[int]] = ..., partners: _Optional[_Iterable[int]] = ...) -> None: ...

class Survey(_message.Message):
    __slots__ = ("slots", "voters", "excess", "optimism")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    EXCESS_FIELD_NUMBER: _ClassVar[int]
    OPTIMISM_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    voters: _containers.RepeatedScalarFieldContainer[int]
    excess: _containers.RepeatedScalarFieldContainer[bytes]
    optimism: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., voters: _Optional[_Iterable[int]] = ..., excess: _Optional[_Iterable[bytes]] = ..., optimism: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("key", "survey")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SURVEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    survey: Survey
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., survey: _Optional[_Union[Survey, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("key", "entry")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    entry: Entry
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class Alarm(_message.Message):
    __slots__ = ("origin", "number", "raised", "lineage", "proof")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    origin: int
    number: int
    raised: bool
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    proof: bytes
    def __init__(self, origin: _Optional[int] = ..., number: _Optional[int] = ..., raised: _Optional[bool] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Curves(_message.Message):
    __slots__ = ("due", "cluster", "degree", "first", "values", "lineage")
    DUE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    due: int
    cluster: int
    degree: int
    first: int
    values: _containers.RepeatedScalarFieldContainer[float]
    lineage: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, due: _Optional[int] = ..., cluster: _Optional[int] = ..., degree: _Optional[int] = ..., first: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., lineage: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Served(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("round", "message")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    round: int
    message: Message
    def __init__(self, round: _Optional[int] = ..., message: _Optional[_Union[Message, _Mapping]] = ...) -> None: ...
