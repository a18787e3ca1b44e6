//! Why a command ends without its result, in kubectl's words, and its exit code.

use kruise_api::text::printable;

/// Exit code of a command whose work failed, or that the API server refused.
pub const FAILED: u8 = 1;
/// Exit code of wrong usage, and of a wait that has timed out.
pub const USAGE_OR_TIMEOUT: u8 = 2;
/// Exit code after SIGINT, as of a shell: 128 and the signal's number.
pub const INTERRUPTED: u8 = 130;

/// Why a command ends without its result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments do not make sense.
    #[error("error: {0}")]
    Usage(String),
    /// The API server refused, or could not be reached.
    #[error("{}", server_message(.0))]
    Server(#[from] kruise_cluster::Error),
    /// There is no such object.
    #[error("Error from server (NotFound): {plural} {name:?} not found")]
    NotFound {
        /// Plural of the kind.
        plural: String,
        /// Name of the object.
        name: String,
    },
    /// Kruise is not installed there, or it is not the intended cluster.
    #[error("error: the server doesn't have a resource type {0:?}; is Kruise installed?")]
    NoResourceType(String),
    /// What is requested cannot be done.
    #[error("error: {0}")]
    Refused(String),
    /// The work that was followed has failed; the lines before say how.
    #[error("error: {0}")]
    Failed(String),
    /// The wait took too long.
    #[error("error: {0}")]
    TimedOut(String),
    /// The user stopped waiting.
    #[error("{0}")]
    Interrupted(String),
    /// The object that was followed was created, and its work continues.
    #[error("{error}\n{hint}")]
    Continuing {
        /// Why it is not followed any more.
        error: Box<Error>,
        /// How to follow it.
        hint: String,
    },
}

impl Error {
    /// The exit code of the command.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::TimedOut(_) => USAGE_OR_TIMEOUT,
            Self::Interrupted(_) => INTERRUPTED,
            Self::Server(_)
            | Self::NotFound { .. }
            | Self::NoResourceType(_)
            | Self::Refused(_)
            | Self::Failed(_) => FAILED,
            Self::Continuing { error, .. } => error.exit_code(),
        }
    }

    /// The error of following an object, with the hint how to follow it; without it if the object was deleted.
    pub fn with_hint(self, hint: impl FnOnce() -> String) -> Self {
        match self {
            Self::Server(_) => Self::Continuing {
                error: Box::new(self),
                hint: hint(),
            },
            other => other,
        }
    }

    /// The error as it is printed: every line safe for a terminal.
    pub fn text(&self) -> String {
        let text = self.to_string();
        text.lines().map(printable).collect::<Vec<_>>().join("\n")
    }

    /// Whether the API server may answer otherwise in a moment.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Server(error) if error.retryable())
    }

    /// Whether the permission is missing; an API server that has just started has not loaded it yet.
    pub fn forbidden(&self) -> bool {
        matches!(self, Self::Server(error) if error.forbidden())
    }
}

fn server_message(error: &kruise_cluster::Error) -> String {
    use kruise_cluster::Error as Cluster;
    match error {
        Cluster::Api(status) if status.reason.is_empty() => {
            format!("Error from server: {}", printable(&status.message))
        }
        Cluster::Api(status) => {
            format!(
                "Error from server ({}): {}",
                status.reason,
                printable(&status.message)
            )
        }
        Cluster::Transport(why) => format!("Unable to connect to the server: {}", printable(why)),
        other => format!("error: {}", printable(&other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn refused(code: u16, reason: &str, message: &str) -> Error {
        let status = Status::failure(message, reason).with_code(code);
        kruise_cluster::Error::Api(Box::new(status)).into()
    }

    #[test]
    fn server_errors_read_as_in_kubectl() {
        let error = refused(403, "Forbidden", "pods is forbidden");
        assert_eq!(error.text(), "Error from server (Forbidden): pods is forbidden");
        assert_eq!(refused(500, "", "no").text(), "Error from server: no");
        assert_eq!(error.exit_code(), FAILED);
    }

    #[test]
    fn lost_contact_is_followed_by_a_hint() {
        let hint = || "the job continues".to_owned();
        let lost = refused(403, "Forbidden", "no").with_hint(hint);
        assert_eq!(
            (lost.text().as_str(), lost.exit_code()),
            ("Error from server (Forbidden): no\nthe job continues", FAILED)
        );
        let deleted = Error::Failed("it was deleted".to_owned()).with_hint(hint);
        assert_eq!(deleted.text(), "error: it was deleted");
    }

    #[test]
    fn errors_cannot_control_the_terminal() {
        let error = refused(400, "Bad\u{1b}Request", "a\u{1b}[2J\nError from server: b");
        assert_eq!(
            error.text(),
            "Error from server (Bad\\u{1b}Request): a\\u{1b}[2J\\nError from server: b"
        );
        assert_eq!(Error::Usage("x\u{9b}y\nz".into()).text(), "error: x\\u{9b}y\nz");
    }

    #[test]
    fn exit_codes_separate_failures_from_usage_and_timeouts() {
        assert_eq!(Error::Failed(String::new()).exit_code(), 1);
        assert_eq!(Error::Refused(String::new()).exit_code(), 1);
        assert_eq!(Error::Usage(String::new()).exit_code(), 2);
        assert_eq!(Error::TimedOut(String::new()).exit_code(), 2);
        assert_eq!(Error::Interrupted(String::new()).exit_code(), 130);
    }
}
