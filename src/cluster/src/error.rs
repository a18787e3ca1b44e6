//! Errors of calls to the API server.

use std::borrow::Cow;
use std::time::Duration;

use crate::retry::MAX_RETRY_AFTER;
use kruise_api::names;
use kruise_ops::panics::Panicked;

/// An error of a call to the API server, or of the configuration to reach it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither kubeconfig nor service account can be used.
    #[error("cannot reach a cluster: {0}")]
    Config(String),
    /// An invalid object name; nothing was sent.
    #[error("invalid name {given:?} of a {kind}: {}", names::SUBDOMAIN)]
    InvalidName {
        /// The kind of the intended request.
        kind: String,
        /// The invalid name.
        given: String,
    },
    /// An invalid namespace; nothing was sent.
    #[error("invalid namespace {given:?} of a {kind}: {}", names::LABEL)]
    InvalidNamespace {
        /// The kind of the intended request.
        kind: String,
        /// The invalid namespace.
        given: String,
    },
    /// No answer in time.
    #[error("API server did not answer {verb} {kind} within {after:?}")]
    Timeout {
        /// The verb of the request.
        verb: &'static str,
        /// The kind of the requested object.
        kind: String,
        /// The timeout of the call.
        after: Duration,
    },
    /// Not sent in time, because too many of our requests wait for responses.
    #[error(
        "cannot {verb} {kind}: too many requests are waiting for the API server, and none ended within {after:?}"
    )]
    TooManyInFlight {
        /// The verb of the request.
        verb: &'static str,
        /// The kind of the intended request.
        kind: String,
        /// The timeout of the call.
        after: Duration,
    },
    /// An error status of the API server.
    #[error("API server refused: {} (HTTP {})", .0.message, .0.code)]
    Api(Box<kube::core::Status>),
    /// The API server executed the request, but its response does not fit our types.
    #[error("cannot parse the {kind} that the API server answered {verb} with: {why}")]
    Unreadable {
        /// The verb of the request.
        verb: &'static str,
        /// The kind of the requested object.
        kind: String,
        /// What is wrong with the response.
        why: String,
    },
    /// The connection failed.
    #[error("API server cannot be reached: {0}")]
    Transport(String),
}

impl Error {
    fn code(&self) -> Option<u16> {
        match self {
            Self::Api(status) => Some(status.code),
            _ => None,
        }
    }

    /// The API server's message alone; our own if it did not answer.
    #[must_use]
    pub fn message(&self) -> Cow<'_, str> {
        match self {
            Self::Api(status) => Cow::Borrowed(&status.message),
            _ => Cow::Owned(self.to_string()),
        }
    }

    /// Whether it is about an object of that kind; `plural` is its resource name.
    #[must_use]
    pub fn is_about(&self, of_kind: &str, plural: &str) -> bool {
        match self {
            Self::Api(status) => status.details.as_ref().is_some_and(|about| about.kind == plural),
            Self::InvalidName { kind, .. }
            | Self::InvalidNamespace { kind, .. }
            | Self::Timeout { kind, .. }
            | Self::TooManyInFlight { kind, .. }
            | Self::Unreadable { kind, .. } => kind == of_kind,
            _ => false,
        }
    }

    fn reason(&self) -> &str {
        match self {
            Self::Api(status) => &status.reason,
            _ => "",
        }
    }

    /// Another writer has changed the object in between; read it again and decide again.
    #[must_use]
    pub fn conflict(&self) -> bool {
        self.code() == Some(409) && self.reason() != "AlreadyExists" && !self.denied()
    }

    /// Admission denied the request: a webhook, which chooses the code itself, or a policy. The words are the API
    /// server's.
    #[must_use]
    pub fn denied(&self) -> bool {
        let Self::Api(status) = self else { return false };
        let message = &status.message;
        let by_webhook = message.starts_with("admission webhook ") && message.contains(" denied the request");
        by_webhook
            || (message.contains("ValidatingAdmissionPolicy '") && message.contains(" denied request: "))
    }

    /// An object of that name exists.
    #[must_use]
    pub fn already_exists(&self) -> bool {
        self.code() == Some(409) && self.reason() == "AlreadyExists"
    }

    /// We lack the permission, or the API server has not loaded it yet: it answers this in the moments after its start.
    #[must_use]
    pub fn forbidden(&self) -> bool {
        matches!(self.code(), Some(401 | 403))
    }

    /// The same call will be refused until the request's object is changed. Permissions, and the object itself, may
    /// appear in a moment.
    #[must_use]
    pub fn permanent(&self) -> bool {
        !self.retryable() && !self.forbidden() && !self.not_found()
    }

    /// The object, or the kind, does not exist.
    #[must_use]
    pub fn not_found(&self) -> bool {
        self.code() == Some(404) && !self.denied()
    }

    /// The resourceVersion is too old; list again.
    #[must_use]
    pub fn expired(&self) -> bool {
        self.code() == Some(410)
    }

    /// Whether the same call may succeed later without any change. For an object that cannot be read, only another read
    /// shows that it was repaired.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Config(_) | Self::InvalidName { .. } | Self::InvalidNamespace { .. } => false,
            Self::Timeout { .. }
            | Self::TooManyInFlight { .. }
            | Self::Unreadable { .. }
            | Self::Transport(_) => true,
            Self::Api(_) if self.too_large() => false,
            Self::Api(status) => status.code >= 500 || self.throttled() || self.conflict(),
        }
    }

    /// A rule, quota, policy or webhook refuses it, and will until a user changes something. A missing role may be
    /// created in a moment.
    #[must_use]
    pub fn rejected(&self) -> bool {
        // The authorizer's message.
        let no_role =
            matches!(self, Self::Api(status) if status.message.contains("\" cannot create resource \""));
        let refusal = self.code().is_some_and(|code| (400..500).contains(&code));
        let other = matches!(self.code(), Some(401 | 404 | 408 | 410 | 413)) && !self.denied();
        refusal && !other && !no_role && !self.retryable() && !self.namespace_terminating()
    }

    /// It concerns all objects of the kind in that namespace, and not this one alone: others need not be tried now.
    #[must_use]
    pub fn refuses_all(&self) -> bool {
        !self.denied() && (!self.rejected() || self.message().contains("exceeded quota"))
    }

    /// The namespace is being deleted, so that nothing can be created in it any more.
    #[must_use]
    pub fn namespace_terminating(&self) -> bool {
        let Self::Api(status) = self else { return false };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        causes
            .into_iter()
            .any(|cause| cause.reason == "NamespaceTerminating")
    }

    /// The API server answered HTTP 500: one of its webhooks cannot be called, or etcd did not accept the object.
    #[must_use]
    pub fn internal(&self) -> bool {
        self.code() == Some(500)
    }

    /// The API server itself answered, with a refusal.
    #[must_use]
    pub fn answered(&self) -> bool {
        matches!(self, Self::Api(_))
    }

    /// The API server is overloaded.
    #[must_use]
    pub fn throttled(&self) -> bool {
        self.code() == Some(429) && !self.denied()
    }

    /// The object is larger than the API server, or etcd behind it, accepts. etcd's limits are returned as HTTP 500.
    #[must_use]
    pub fn too_large(&self) -> bool {
        let Self::Api(status) = self else { return false };
        let texts = ["request is too large", "message larger than max"];
        status.code == 413 || (status.code == 500 && texts.iter().any(|text| status.message.contains(text)))
    }

    /// Whether the write may have been executed anyway, or may be later. A webhook chooses the code of its denial, and
    /// nothing is stored after one.
    #[must_use]
    pub fn outcome_unknown(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::InvalidName { .. }
            | Self::InvalidNamespace { .. }
            | Self::TooManyInFlight { .. } => false,
            Self::Timeout { .. } | Self::Unreadable { .. } | Self::Transport(_) => true,
            Self::Api(status) => status.code >= 500 && !self.denied() && !self.too_large(),
        }
    }

    /// The pause that the API server requests before a retry, at most five minutes.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let Self::Api(status) = self else { return None };
        let seconds = status.details.as_ref()?.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)).min(MAX_RETRY_AFTER))
    }

    /// The word used as metric label and condition reason.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::Config(_) => "config",
            Self::InvalidName { .. } | Self::InvalidNamespace { .. } => "invalid_name",
            Self::Timeout { .. } => "timeout",
            Self::TooManyInFlight { .. } => "crowded",
            Self::Unreadable { .. } => "unreadable",
            Self::Transport(_) => "unreachable",
            Self::Api(status) => match status.code {
                401 => "unauthorized",
                403 => "forbidden",
                404 => "not_found",
                409 => "conflict",
                422 => "invalid",
                429 => "throttled",
                500.. => "server_error",
                _ => "refused",
            },
        }
    }
}

impl From<Panicked> for Error {
    fn from(panicked: Panicked) -> Self {
        Self::Transport(panicked.to_string())
    }
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Api(status),
            other => Self::Transport(error_chain(&other)),
        }
    }
}

/// An error with its causes, joined by colons, without repetitions.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn outcome_of_a_refusal_is_known() {
        for (code, message, is_unknown) in [
            (500, "Internal error occurred", true),
            (504, "Timeout: request did not complete", true),
            (422, "invalid", false),
            (500, "etcdserver: request is too large", false),
            (500, "admission webhook \"w\" denied the request: no", false),
            (
                503,
                "jobs \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
                false,
            ),
        ] {
            let status = json!({ "status": "Failure", "code": code, "reason": "", "message": message });
            let error = Error::Api(serde_json::from_value(status).unwrap());
            assert_eq!(error.outcome_unknown(), is_unknown, "{error}");
        }
    }

    #[test]
    fn retry_after_is_bounded() {
        for (requested, pause) in [(0, None), (7, Some(7)), (u32::MAX, Some(300))] {
            let status = json!({ "status": "Failure", "code": 429, "reason": "TooManyRequests", "message": "later",
                "details": { "retryAfterSeconds": requested } });
            let error = Error::Api(serde_json::from_value(status).unwrap());
            assert_eq!(error.retry_after(), pause.map(Duration::from_secs));
        }
    }
}
