//! Errors of calls to the container runtime.

use std::path::PathBuf;
use std::time::Duration;

use kruise_api::image_reference::InvalidReference;

/// A failed call to the runtime.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The image reference is not valid.
    #[error(transparent)]
    InvalidReference(#[from] InvalidReference),
    /// No process listens at the socket, or the connection broke.
    #[error("runtime at {socket} cannot be reached for {method}: {why}")]
    Unreachable {
        /// The runtime's socket.
        socket: PathBuf,
        /// The CRI method.
        method: &'static str,
        /// Error of the connection.
        why: String,
    },
    /// The call exceeded its timeout.
    #[error("runtime at {socket} did not answer {method} within {after:?}")]
    Timeout {
        /// The runtime's socket.
        socket: PathBuf,
        /// The CRI method.
        method: &'static str,
        /// How long the call waited.
        after: Duration,
    },
    /// The runtime does not have the method: too old, or not a CRI runtime.
    #[error("runtime at {socket} does not implement {method}: {message}")]
    Unimplemented {
        /// The runtime's socket.
        socket: PathBuf,
        /// The CRI method.
        method: &'static str,
        /// The runtime's message.
        message: String,
    },
    /// The response cannot be used: too long, or against the CRI specification.
    #[error("runtime at {socket} gave an answer to {method} that cannot be used: {why}")]
    InvalidResponse {
        /// The runtime's socket.
        socket: PathBuf,
        /// The CRI method.
        method: &'static str,
        /// What is wrong with the response.
        why: String,
    },
    /// The runtime tried to pull and failed.
    #[error("pulling {image}: {cause}: {message}")]
    Pull {
        /// The requested image.
        image: String,
        /// Cause of the failure.
        cause: PullCause,
        /// The runtime's message.
        message: String,
    },
    /// The runtime refused for a different reason.
    #[error("runtime at {socket} refused {method}: {message} ({code:?})")]
    Rejected {
        /// The runtime's socket.
        socket: PathBuf,
        /// The CRI method.
        method: &'static str,
        /// The gRPC status.
        code: tonic::Code,
        /// The runtime's message.
        message: String,
    },
}

impl Error {
    /// Whether the same call may succeed later without a change of the request.
    pub fn retryable(&self) -> bool {
        match self {
            Self::InvalidReference(_) | Self::Unimplemented { .. } => false,
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::InvalidResponse { .. } => true,
            Self::Pull { cause, .. } => cause.retryable(),
            Self::Rejected { code, .. } => !matches!(
                code,
                tonic::Code::InvalidArgument | tonic::Code::NotFound | tonic::Code::PermissionDenied
            ),
        }
    }

    /// The word used as metric label and reason.
    pub fn category(&self) -> &'static str {
        match self {
            Self::InvalidReference(_) => "invalid_reference",
            Self::Unreachable { .. } => "unreachable",
            Self::Timeout { .. } => "timeout",
            Self::Unimplemented { .. } => "unimplemented",
            Self::InvalidResponse { .. } => "bad_answer",
            Self::Pull { cause, .. } => cause.category(),
            Self::Rejected { .. } => "refused",
        }
    }
}

/// The lower-case patterns that identify a cause; the first match counts. Numbers alone are not used: digests and ports
/// contain them, too.
const CAUSE_PATTERNS: [(PullCause, &[&str]); 7] = [
    (
        PullCause::DiskFull,
        &["no space left on device", "disk quota exceeded"],
    ),
    (
        PullCause::WrongPlatform,
        &[
            "no match for platform",
            "no image found in manifest list",
            "no image found in image index",
        ],
    ),
    (PullCause::Throttled, &["toomanyrequests", "429 too many"]),
    (
        PullCause::Unauthorized,
        &[
            "unauthorized",
            "authorization failed",
            "authentication required",
            "denied",
            "forbidden",
            "no basic auth credentials",
            "insufficient_scope",
        ],
    ),
    (
        PullCause::NotFound,
        &["not found", "manifest unknown", "name unknown"],
    ),
    (
        PullCause::RegistryUnavailable,
        &[
            "connection refused",
            "no such host",
            "i/o timeout",
            "connection reset",
            "no route to host",
            "network is unreachable",
            "tls handshake timeout",
            "503 service unavailable",
            "502 bad gateway",
            "504 gateway timeout",
            "500 internal server error",
            "server misbehaving",
            "dial tcp",
            ": eof",
            "unexpected eof",
        ],
    ),
    (
        PullCause::InvalidImage,
        &[
            "media type",
            "mediatype",
            "invalid character",
            "unmarshal",
            "failed size validation",
            "unexpected commit digest",
            "unexpected commit size",
            "failed commit",
            "malformed http",
            "x509",
            "server gave http response",
            "invalid checksum",
            "gzip: invalid",
            "invalid tar",
            "failed to extract",
            "unexpected status",
        ],
    ),
];

/// Why an image could not be pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullCause {
    /// The registry has no such image, tag or digest.
    NotFound,
    /// The registry requires credentials, or different ones.
    Unauthorized,
    /// The registry cannot be reached.
    RegistryUnavailable,
    /// The registry returned something that is not an image.
    InvalidImage,
    /// The image exists, but not for this machine.
    WrongPlatform,
    /// The node's disk is full.
    DiskFull,
    /// The node's disk has too little space for the rest of the image.
    InsufficientDisk,
    /// The registry limits the request rate.
    Throttled,
    /// A cause that no pattern matches.
    Other,
}

impl PullCause {
    /// Derives the cause from a runtime's status code and message. Runtimes have no codes for most of this, so the
    /// messages of containerd and CRI-O and the registries' own error codes decide; see `CAUSE_PATTERNS`.
    pub fn classify(code: tonic::Code, message: &str) -> Self {
        let text = message.to_lowercase();
        let matched = CAUSE_PATTERNS
            .iter()
            .find(|(_, words)| words.iter().any(|w| text.contains(w)));
        match (matched, code) {
            (Some((cause, _)), _) => *cause,
            (None, tonic::Code::ResourceExhausted) => Self::DiskFull,
            (None, tonic::Code::NotFound) => Self::NotFound,
            (None, _) => Self::Other,
        }
    }

    /// Whether a retry may succeed.
    pub fn retryable(self) -> bool {
        !matches!(self, Self::WrongPlatform)
    }

    /// The word used as metric label and reason.
    pub fn category(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Unauthorized => "unauthorized",
            Self::RegistryUnavailable => "registry_down",
            Self::InvalidImage => "registry_garbage",
            Self::WrongPlatform => "wrong_platform",
            Self::DiskFull => "disk_full",
            Self::InsufficientDisk => "insufficient_disk",
            Self::Throttled => "throttled",
            Self::Other => "pull_failed",
        }
    }
}

impl std::fmt::Display for PullCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotFound => "the registry has no such image",
            Self::Unauthorized => "the registry refuses the credentials, or wants some",
            Self::RegistryUnavailable => "the registry cannot be reached",
            Self::InvalidImage => "the registry's answer is not a usable image",
            Self::WrongPlatform => "the image is not made for this machine's platform",
            Self::DiskFull => "the node's disk is full",
            Self::InsufficientDisk => "InsufficientDisk",
            Self::Throttled => "the registry asks to come back later",
            Self::Other => "the runtime could not pull it",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_ports_and_digests_are_no_pull_cause() {
        let message = "failed commit on ref \"layer-sha256:401404503\" from 10.0.0.1:40401";
        assert_eq!(
            PullCause::classify(tonic::Code::Unknown, message),
            PullCause::InvalidImage
        );
    }

    #[test]
    fn status_code_decides_when_the_message_is_unclear() {
        assert_eq!(
            PullCause::classify(tonic::Code::NotFound, "gone"),
            PullCause::NotFound
        );
        assert_eq!(PullCause::classify(tonic::Code::Unknown, "odd"), PullCause::Other);
    }
}
