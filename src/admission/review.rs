//! Reviews: what the API server asks, and how our answers look. One route per kind and step.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use kube::core::DynamicObject;
use kube::core::Status;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use kube::core::conversion::{ConversionRequest, ConversionResponse, ConversionReview};
use serde_json::{Value, json};

use super::look::Look;
use super::{Options, cloneset, container_recreate_request, image_pull_job, node_image};
use crate::api::{convert, keys};
use crate::ops::metrics::metrics;

/// A list of thousands of objects is converted in one request.
const LARGEST_CONVERSION: usize = 256 << 20;
/// New and old object of at most 3 MiB each, and what surrounds them.
const LARGEST_ADMISSION: usize = 16 << 20;
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
#[derive(Clone, Debug)]
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
    let served = Served {
        look,
        off: options.off.clone().into(),
    };
    let admission = Router::new()
        .route("/{step}", post(admit))
        .layer(DefaultBodyLimit::max(LARGEST_ADMISSION))
        .with_state(served);
    let conversion = Router::new()
        .route(keys::CONVERT_PATH, post(converted))
        .layer(DefaultBodyLimit::max(LARGEST_CONVERSION));
    conversion.merge(admission)
}

async fn converted(Json(review): Json<ConversionReview>) -> Response {
    let Ok(request) = ConversionRequest::from_review(review) else {
        return (StatusCode::BAD_REQUEST, "this ConversionReview has no request").into_response();
    };
    Json(answer_conversion(request).into_review()).into_response()
}

fn answer_conversion(mut request: ConversionRequest) -> ConversionResponse {
    let to = request.desired_api_version.clone();
    let objects = std::mem::take(&mut request.objects);
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
        .map(|object| convert::convert(object, &to))
        .collect();
    let response = ConversionResponse::for_request(request);
    match all {
        Ok(objects) => {
            count(kind, "convert", "allowed");
            response.success(objects)
        }
        Err(why) => {
            tracing::warn!(kind, %why, "cannot convert");
            count(kind, "convert", "failed");
            response.failure(Status::failure(&why.to_string(), why.category()).with_code(422))
        }
    }
}

async fn admit(
    State(served): State<Served>,
    Path(step): Path<String>,
    Json(review): Json<AdmissionReview<DynamicObject>>,
) -> Response {
    let Ok(request): Result<AdmissionRequest<DynamicObject>, _> = review.try_into() else {
        return (StatusCode::BAD_REQUEST, "this AdmissionReview has no request").into_response();
    };
    let Some((kind, mutate)) = route(&step) else {
        return (StatusCode::NOT_FOUND, format!("no webhook at /{step}")).into_response();
    };
    let response = AdmissionResponse::from(&request);
    // Nothing is checked when an object goes.
    let Some(asked) = asked(&request) else {
        return Json(response.into_review()).into_response();
    };
    let decision = match served.off.iter().find(|(off, _)| *off == kind) {
        Some((_, gate)) => Decision::Deny {
            code: 403,
            why: format!("feature gate {gate} of kruise-manager is off"),
        },
        None => decide(&served.look, kind, mutate, &asked).await,
    };
    let step = if mutate { "mutate" } else { "validate" };
    match &decision {
        Decision::Allow { .. } => count(kind, step, "allowed"),
        Decision::Deny { code, why } => {
            tracing::info!(kind, namespace = asked.namespace, why, "refused");
            count(kind, step, if *code == 500 { "failed" } else { "refused" });
        }
    }
    Json(answer(response, &asked.object, decision).into_review()).into_response()
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

fn asked(request: &AdmissionRequest<DynamicObject>) -> Option<Request> {
    Some(Request {
        object: serde_json::to_value(request.object.as_ref()?).ok()?,
        old: request
            .old_object
            .as_ref()
            .and_then(|old| serde_json::to_value(old).ok()),
        namespace: request.namespace.clone().unwrap_or_default(),
        version: request
            .request_kind
            .as_ref()
            .unwrap_or(&request.kind)
            .version
            .clone(),
    })
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

fn answer(mut response: AdmissionResponse, asked: &Value, decision: Decision) -> AdmissionResponse {
    match decision {
        Decision::Deny { code, why } => {
            response.allowed = false;
            let reason = match code {
                403 => "Forbidden",
                422 => "Invalid",
                _ => "InternalError",
            };
            response.result = Status::failure(&why, reason).with_code(code);
            response
        }
        Decision::Allow { object, warnings } => {
            if !warnings.is_empty() {
                response.warnings = Some(warnings);
            }
            let patch = json_patch::diff(asked, &object);
            if patch.0.is_empty() {
                return response;
            }
            match response.with_patch(patch) {
                Ok(response) => response,
                Err(why) => AdmissionResponse::invalid(json!({ "patch": why.to_string() })),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    fn conversion(objects: Vec<Value>) -> ConversionResponse {
        let review = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview",
            "request": { "uid": "u", "desiredAPIVersion": "apps.kruise.io/v1alpha1", "objects": objects },
        });
        let review: ConversionReview = serde_json::from_value(review).unwrap();
        answer_conversion(ConversionRequest::from_review(review).unwrap())
    }

    #[test]
    fn all_objects_of_a_list_are_converted_or_none() {
        let good = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" } });
        let answer = conversion(vec![good.clone(), good.clone()]);
        assert!(answer.result.is_success());
        assert_eq!(answer.converted_objects.len(), 2);
        assert_eq!(
            answer.converted_objects[1]["apiVersion"],
            "apps.kruise.io/v1alpha1"
        );
        let answer = conversion(vec![
            good,
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {} }),
        ]);
        assert!(answer.converted_objects.is_empty());
        assert!(answer.result.message.contains("Pod"), "{:?}", answer.result);
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

    fn answered(decision: Decision) -> Value {
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "name": "n", "operation": "CREATE", "userInfo": {},
                "kind": { "group": "g", "version": "v", "kind": "K" },
                "resource": { "group": "g", "version": "v", "resource": "ks" },
                "object": { "apiVersion": "g/v", "kind": "K", "metadata": { "name": "n" }, "spec": { "a": 1 } },
            },
        });
        let review: AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
        let request: AdmissionRequest<DynamicObject> = review.try_into().unwrap();
        let object = asked(&request).unwrap().object;
        serde_json::to_value(answer(AdmissionResponse::from(&request), &object, decision)).unwrap()
    }

    #[test]
    fn answers_carry_words_and_the_smallest_patch() {
        let no = answered(Decision::Deny {
            code: 422,
            why: "spec.a: Invalid value: 1: too small".into(),
        });
        assert_eq!((&no["allowed"], &no["uid"]), (&json!(false), &json!("u")));
        assert_eq!(no["status"]["message"], "spec.a: Invalid value: 1: too small");
        assert_eq!(no["status"]["code"], 422);

        let same =
            json!({ "apiVersion": "g/v", "kind": "K", "metadata": { "name": "n" }, "spec": { "a": 1 } });
        let yes = answered(Decision::Allow {
            object: same.clone(),
            warnings: vec!["look".into()],
        });
        assert_eq!((&yes["allowed"], &yes["patch"]), (&json!(true), &Value::Null));
        assert_eq!(yes["warnings"], json!(["look"]));

        let mut other = same;
        other["spec"]["b"] = json!(2);
        let yes = answered(Decision::Allow {
            object: other,
            warnings: Vec::new(),
        });
        let patch: Vec<u8> = serde_json::from_value(yes["patch"].clone()).unwrap_or_else(|_| {
            use base64::Engine;
            base64::prelude::BASE64_STANDARD
                .decode(yes["patch"].as_str().unwrap())
                .unwrap()
        });
        assert_eq!(
            serde_json::from_slice::<Value>(&patch).unwrap(),
            json!([{ "op": "add", "path": "/spec/b", "value": 2 }])
        );
    }
}
