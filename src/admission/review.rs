//! Reviews: what the API server asks, and how our answers look. One route per kind and step.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use kube::core::Status;
use serde_json::Value;

use super::look::Look;
use super::room::{Room, held};
use super::wire::{self, Unreadable};
use super::{Options, cloneset, container_recreate_request, image_pull_job, node_image};
use crate::api::{convert, keys};
use crate::ops::metrics::metrics;

/// New and old object of at most 3 MiB each, and what surrounds them. Bytes.
const LARGEST_ADMISSION: usize = 16 << 20;
/// A list of thousands of objects may be converted in one request. Bytes.
const LARGEST_CONVERSION: usize = 64 << 20;
/// The kinds that are answered for, in lower case.
const KINDS: [&str; 4] = [
    "cloneset",
    "nodeimage",
    "imagepulljob",
    "containerrecreaterequest",
];

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Yes, with these changes, and these words to the user.
    Allow {
        /// The object as it should be.
        object: Value,
        /// Shown by kubectl.
        warnings: Vec<String>,
    },
    /// No.
    Deny {
        /// HTTP status that the user gets.
        code: u16,
        /// Field, value and what to do, in words.
        why: String,
    },
}

/// Mistakes of the user's: for each the field, the value it has, and what is wrong with it.
#[derive(Debug, Default)]
pub(super) struct Problems(Vec<String>);

impl Problems {
    /// Notes one.
    pub fn add(&mut self, field: impl std::fmt::Display, value: &Value, why: impl std::fmt::Display) {
        self.0.push(match value {
            Value::Null => format!("{field}: Required value: {why}"),
            value => format!("{field}: Invalid value: {value}: {why}"),
        });
    }

    /// Notes one that is in words already.
    pub fn tell(&mut self, mistake: String) {
        self.0.push(mistake);
    }

    /// All of them, each in words.
    pub fn into_words(self) -> Vec<String> {
        self.0
    }

    /// No when there are any, else yes with `object`.
    pub fn decide(self, object: Value, warnings: Vec<String>) -> Decision {
        if self.0.is_empty() {
            return Decision::Allow { object, warnings };
        }
        Decision::Deny {
            code: 422,
            why: self.0.join("; "),
        }
    }
}

/// What an answer is about.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    /// The object as asked for.
    pub object: Value,
    /// The object as it is, on updates.
    pub old: Option<Value>,
    /// Namespace of the object; empty for cluster-wide ones.
    pub namespace: String,
    /// Version that the user speaks; the objects here are in v1beta1.
    pub version: String,
}

/// What every answer may need.
#[derive(Clone)]
struct Served {
    look: Look,
    off: Arc<[(&'static str, &'static str)]>,
}

/// Paths as upstream's, which existing configurations may point at.
pub(super) fn router(look: Look, options: &Options) -> Router {
    let admitting = Room::new(2 * LARGEST_ADMISSION, LARGEST_ADMISSION);
    let converting = Room::new(LARGEST_CONVERSION, LARGEST_CONVERSION);
    let served = Served {
        look,
        off: options.off.clone().into(),
    };
    let admission = Router::new()
        .route("/{step}", post(admit))
        .layer(from_fn_with_state(admitting, held))
        .with_state(served);
    let conversion = Router::new()
        .route(keys::CONVERT_PATH, post(converted))
        .layer(from_fn_with_state(converting, held));
    // The room is bounded already.
    conversion.merge(admission).layer(DefaultBodyLimit::disable())
}

async fn converted(body: Bytes) -> Response {
    let (review, objects, to) = match wire::conversion(&body) {
        Ok((review, (objects, to))) => (review, objects, to),
        Err(Unreadable::Review(review, why)) => {
            let why =
                Status::failure(&format!("an object cannot be read: {why}"), "unreadable").with_code(422);
            return Json(review.converted(Err(Box::new(why)))).into_response();
        }
        Err(Unreadable::Foreign(why)) => return foreign(&why),
    };
    drop(body);
    Json(review.converted(convert_all(objects, &to))).into_response()
}

fn foreign(why: &serde_json::Error) -> Response {
    (StatusCode::BAD_REQUEST, format!("this is no review: {why}")).into_response()
}

/// All of them or none.
fn convert_all(objects: Vec<Value>, to: &str) -> Result<Vec<Value>, Box<Status>> {
    let kind = objects
        .first()
        .and_then(|object| object["kind"].as_str())
        .unwrap_or_default();
    // What was sent by somebody is no label unless it is one of ours.
    let kind = KINDS
        .into_iter()
        .find(|known| kind.eq_ignore_ascii_case(known))
        .unwrap_or("other");
    let all: Result<Vec<_>, _> = objects
        .into_iter()
        .map(|object| convert::convert(object, to))
        .collect();
    count(kind, "convert", if all.is_ok() { "allowed" } else { "failed" });
    all.map_err(|why| {
        tracing::warn!(kind, %why, "cannot convert");
        Box::new(Status::failure(&why.to_string(), why.category()).with_code(422))
    })
}

async fn admit(State(served): State<Served>, Path(step): Path<String>, body: Bytes) -> Response {
    let Some((kind, mutate)) = route(&step) else {
        return (StatusCode::NOT_FOUND, format!("no webhook at /{step}")).into_response();
    };
    let (review, asked, decision) = match wire::admission(&body) {
        // Nothing is checked when an object goes.
        Ok((review, None)) => return Json(review.agreed()).into_response(),
        Ok((review, Some(asked))) => {
            // The answer may wait for others; the text is not needed meanwhile.
            drop(body);
            let decision = match served.off.iter().find(|(off, _)| *off == kind) {
                Some((_, gate)) => Decision::Deny {
                    code: 403,
                    why: format!("feature gate {gate} of kruise-manager is off"),
                },
                None => decide(&served.look, kind, mutate, &asked).await,
            };
            (review, asked, decision)
        }
        Err(Unreadable::Review(review, why)) => (review, Request::default(), unreadable(&why)),
        Err(Unreadable::Foreign(why)) => return foreign(&why),
    };
    let step = if mutate { "mutate" } else { "validate" };
    match &decision {
        Decision::Allow { .. } => count(kind, step, "allowed"),
        Decision::Deny { code, why } => {
            tracing::info!(kind, namespace = asked.namespace, why, "refused");
            count(kind, step, if *code == 500 { "failed" } else { "refused" });
        }
    }
    Json(review.decided(&asked.object, decision)).into_response()
}

/// The controllers could not read it either.
fn unreadable(why: &serde_json::Error) -> Decision {
    Decision::Deny {
        code: 422,
        why: format!("this object cannot be read; fields may be nested some 120 levels deep: {why}"),
    }
}

fn count(kind: &str, step: &str, result: &str) {
    let labels = [
        ("kind", kind.to_owned()),
        ("step", step.to_owned()),
        ("result", result.to_owned()),
    ];
    metrics().reviews.get_or_create(&labels).inc();
}

fn route(step: &str) -> Option<(&str, bool)> {
    let mutate = step
        .strip_prefix("mutate-apps-kruise-io-")
        .map(|kind| (kind, true));
    let (kind, mutate) = mutate.or_else(|| {
        step.strip_prefix("validate-apps-kruise-io-")
            .map(|kind| (kind, false))
    })?;
    KINDS.contains(&kind).then_some((kind, mutate))
}

async fn decide(look: &Look, kind: &str, mutate: bool, asked: &Request) -> Decision {
    match (kind, mutate) {
        ("cloneset", true) => cloneset::fill_in(asked, look.templates(asked).await),
        ("cloneset", false) => {
            let (strangers, stored) = tokio::join!(look.no_pods(asked), look.stored_template(asked));
            cloneset::check(asked, &strangers, stored.as_ref())
        }
        ("nodeimage", true) => node_image::fill_in(asked, look.cluster.clock.now()),
        ("nodeimage", false) => node_image::check(asked),
        ("imagepulljob", true) => image_pull_job::fill_in(asked),
        ("imagepulljob", false) => image_pull_job::check(asked, &look.unknown_nodes(asked).await),
        (_, true) if asked.old.is_none() => match look.at_pod(asked).await {
            Ok(seen) => container_recreate_request::decide(asked, &seen),
            Err(why) => Decision::Deny {
                code: 500,
                why: format!("the Pod that the request is for could not be read, try again: {why}"),
            },
        },
        _ => Decision::Allow {
            object: asked.object.clone(),
            warnings: Vec::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    #[test]
    fn all_objects_of_a_list_are_converted_or_none() {
        let good = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" } });
        let to = "apps.kruise.io/v1alpha1";
        let objects = convert_all(vec![good.clone(), good.clone()], to).unwrap();
        assert_eq!(objects.len(), 2);
        assert_eq!(objects[1]["apiVersion"], to);
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {} });
        let why = convert_all(vec![good, pod], to).unwrap_err();
        assert!(why.message.contains("Pod"), "{why:?}");
    }

    #[test]
    fn only_upstream_s_paths_are_served() {
        assert_eq!(
            route("mutate-apps-kruise-io-nodeimage"),
            Some(("nodeimage", true))
        );
        assert_eq!(
            route("validate-apps-kruise-io-imagepulljob"),
            Some(("imagepulljob", false))
        );
        for other in ["mutate-pod", "mutate-apps-kruise-io-sidecarset", "", "nodeimage"] {
            assert_eq!(route(other), None);
        }
    }
}
