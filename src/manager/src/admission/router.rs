//! Takes each review to what decides it, and the decision back. One route per kind and step.

use std::panic::resume_unwind;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use kube::core::Status;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::yield_now;

use super::connections::Caller;
use super::look::Look;
use super::review::{Decision, Request};
use super::room::{Kept, Room, Shares, held};
use super::wire::{self, Unreadable};
use super::{Options, cloneset, container_recreate_request, deletion, image_pull_job, node_image};
use kruise_api::json::memory;
use kruise_api::validation::{LONGEST_FIELD, cut};
use kruise_api::{Kind, convert, keys};
use kruise_ops::Gate;
use kruise_ops::metrics::metrics;
use kruise_ops::panics;

/// New and old object of at most 3 MiB each, and what surrounds them. Bytes.
const LARGEST_ADMISSION: usize = 16 << 20;
/// A list of thousands of objects may be converted in one request. Bytes.
const LARGEST_CONVERSION: usize = 64 << 20;
/// A larger list is converted beside the tasks of this process, since it takes up to seconds. Bytes.
const AT_ONCE: usize = 256 << 10;
/// Objects of a review are in memory so often at most while it is answered: as asked for, as a dry run is asked for and
/// answers, and as they are to be.
const COPIES: usize = 4;
/// Memory that the objects of all reviews may take while they are answered, in bytes. The container has 512 MiB, of which
/// conversions may take some 300.
const ALL_MEMORY: usize = 160 << 20;
/// The most of a refusal that is logged, in characters.
const LONGEST_LOGGED: usize = 500;
/// The kind whose deletion is judged, as it is counted.
const NAMESPACE: &str = "namespace";

/// What every answer may need.
#[derive(Clone)]
struct Served {
    look: Look,
    off: Arc<[(Kind, Gate)]>,
}

/// Paths as upstream's, which existing configurations may point at.
pub(super) fn router(look: Look, options: &Options) -> Router {
    let mut admitting = Room::new(2 * LARGEST_ADMISSION, LARGEST_ADMISSION);
    admitting.weigh(COPIES * wire::MOST_MEMORY, ALL_MEMORY, weight);
    let converting = Room::new(LARGEST_CONVERSION + LARGEST_CONVERSION / 8, LARGEST_CONVERSION);
    let served = Served {
        look,
        off: options.off.clone().into(),
    };
    let admission = Router::new()
        .route("/{step}", post(admit))
        .route(keys::VALIDATE_NAMESPACE_PATH, post(judge_deletion))
        .layer(from_fn_with_state(admitting, held))
        .with_state(served);
    let conversion = Router::new()
        .route(keys::CONVERT_PATH, post(converted))
        .layer(from_fn_with_state(converting, held))
        .with_state(Turns::new());
    // The room is bounded already.
    conversion
        .merge(admission)
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(isolate))
}

/// The memory that a review takes while it is answered, in bytes.
fn weight(text: &[u8]) -> usize {
    memory(text).saturating_mul(COPIES)
}

/// Ends a review that panics, and nothing else. The API server takes the answer for a webhook that failed, and does what
/// the webhook's `failurePolicy` says.
async fn isolate(request: axum::extract::Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let step = path.trim_start_matches('/');
    match panics::isolated("admission", cut(&path, LONGEST_FIELD), next.run(request)).await {
        Ok(response) => response,
        Err(panicked) => {
            let (kind, step) = match route(step) {
                Some((kind, mutate)) => (kind.row().lower, step_of(mutate)),
                None => ("other", "convert"),
            };
            count(kind, step, "failed");
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the review failed: {panicked}"),
            )
                .into_response()
        }
    }
}

/// Turns to convert, which is work without a pause.
#[derive(Clone)]
struct Turns {
    /// As many for each address as there are threads: a list of another address waits for so many, not for all that are
    /// there.
    of_address: Shares,
    /// The turn of large lists. The memory of one object is bounded, and so is that of all when there is one at a time.
    large: Arc<Semaphore>,
}

impl Turns {
    fn new() -> Self {
        Self {
            of_address: Shares::of(Handle::current().metrics().num_workers()),
            large: Arc::new(Semaphore::new(1)),
        }
    }
}

async fn converted(
    State(turns): State<Turns>,
    Extension(kept): Extension<Kept>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Response {
    if body.len() <= AT_ONCE {
        let _turn = turns.of_address.left(caller.address).acquire_owned().await;
        // Those that are ready, too, find the turn taken, and make room for others until it is theirs.
        yield_now().await;
        return convert_text(&body);
    }
    let turn = turns.large.acquire_owned().await;
    // Who asked may have gone when it ends; until then it has its turn and its room.
    let work = move || {
        let answer = convert_text(&body);
        drop((turn, kept));
        answer
    };
    let work = tokio::task::spawn_blocking(work).await;
    work.unwrap_or_else(|ended| match ended.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(ended) => (StatusCode::SERVICE_UNAVAILABLE, ended.to_string()).into_response(),
    })
}

fn convert_text(body: &[u8]) -> Response {
    let (review, objects, to) = match wire::conversion(body) {
        Ok((review, (objects, to))) => (review, objects, to),
        Err(Unreadable::Review(review, why)) => {
            let why = Status::failure(&why, "unreadable").with_code(422);
            return Json(review.unconverted(why)).into_response();
        }
        Err(Unreadable::Foreign(code, why)) => return foreign(code, why),
    };
    let (head, foot) = match review.clone().converted() {
        Ok(parts) => parts,
        Err(why) => return foreign(StatusCode::BAD_REQUEST, why.to_string()),
    };
    match convert_all(&objects, &to, head, most_of(body)) {
        Ok(mut answer) => {
            answer.extend_from_slice(foot.as_bytes());
            ([(CONTENT_TYPE, "application/json")], answer).into_response()
        }
        Err(why) => Json(review.unconverted(*why)).into_response(),
    }
}

/// Bytes that the answer to a conversion may have: what annotations carry is in an object twice.
fn most_of(body: &[u8]) -> usize {
    (2 * body.len()).saturating_add(1 << 20)
}

fn foreign(code: StatusCode, why: String) -> Response {
    count("other", "read", "refused");
    (code, why).into_response()
}

/// All of them or none: their texts with commas after `head`, of `most` bytes at most.
fn convert_all(objects: &[&RawValue], to: &str, head: String, most: usize) -> Result<Vec<u8>, Box<Status>> {
    let (mut kind, mut answer) = ("other", head.into_bytes());
    let all = objects.iter().enumerate().try_for_each(|(at, text)| {
        let object = wire::object(text).map_err(|why| (why, "unreadable"))?;
        if at == 0 {
            kind = label(&object);
        }
        let object = convert::convert(object, to).map_err(|why| (why.to_string(), why.category()))?;
        if at > 0 {
            answer.push(b',');
        }
        serde_json::to_writer(&mut answer, &object).map_err(|why| (why.to_string(), "unreadable"))?;
        if answer.len() > most {
            let why = format!("the converted objects are too large: {most} bytes are the most");
            return Err((why, "too_large"));
        }
        Ok(())
    });
    count(kind, "convert", if all.is_ok() { "allowed" } else { "failed" });
    let Err((why, reason)) = all else {
        return Ok(answer);
    };
    let words = &*cut(&why, LONGEST_LOGGED);
    tracing::warn!(kind, why = words, "cannot convert");
    Err(Box::new(Status::failure(words, reason).with_code(422)))
}

/// The kind of an object as a label of metrics: what was sent by somebody is none unless it is one of ours.
fn label(object: &Value) -> &'static str {
    let kind = object["kind"].as_str().and_then(Kind::named);
    kind.map_or("other", |kind| kind.row().lower)
}

async fn admit(
    State(served): State<Served>,
    Extension(caller): Extension<Caller>,
    Path(step): Path<String>,
    body: Bytes,
) -> Response {
    let Some((kind, mutate)) = route(&step) else {
        return (StatusCode::NOT_FOUND, format!("no webhook at /{step}")).into_response();
    };
    let (review, asked) = match wire::admission(&body) {
        Ok(read) => read,
        Err(why) => return unread(kind.row().lower, mutate, why),
    };
    // The answer may wait for others; the text is not needed meanwhile.
    drop(body);
    // Nothing is checked when an object goes.
    let Some(asked) = asked else {
        return Json(review.agreed()).into_response();
    };
    let decision = match served.off.iter().find(|(off, _)| *off == kind) {
        Some((_, gate)) => Decision::Deny {
            code: 403,
            why: format!("feature gate {} of kruise-manager is off", gate.name()),
        },
        None => decide(&served.look.asked_by(&caller), kind, mutate, &asked).await,
    };
    note(kind.row().lower, mutate, &asked.namespace, &decision);
    Json(review.decided(&asked.object, decision)).into_response()
}

async fn judge_deletion(
    State(served): State<Served>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Response {
    let (review, going) = match wire::deletion(&body) {
        Ok(read) => read,
        Err(why) => return unread(NAMESPACE, false, why),
    };
    drop(body);
    let Some(name) = going.as_ref().and_then(deletion::protected) else {
        return Json(review.agreed()).into_response();
    };
    let decision = deletion::decide(name, served.look.asked_by(&caller).kept(name).await);
    note(NAMESPACE, false, name, &decision);
    Json(review.decided(&Value::Null, decision)).into_response()
}

/// The answer to a review that cannot be read, or to what is none.
fn unread(kind: &str, mutate: bool, why: Unreadable) -> Response {
    match why {
        Unreadable::Review(review, why) => {
            let why = Decision::Deny { code: 422, why };
            note(kind, mutate, "", &why);
            Json(review.decided(&Value::Null, why)).into_response()
        }
        Unreadable::Foreign(code, why) => foreign(code, why),
    }
}

/// Counts a decision, and logs a refusal.
fn note(kind: &str, mutate: bool, namespace: &str, decision: &Decision) {
    let step = step_of(mutate);
    match decision {
        Decision::Allow { .. } => count(kind, step, "allowed"),
        Decision::Deny { code, why } => {
            let why = &*cut(why, LONGEST_LOGGED);
            tracing::info!(kind, namespace, why, "refused");
            count(kind, step, if *code == 500 { "failed" } else { "refused" });
        }
    }
}

fn step_of(mutate: bool) -> &'static str {
    if mutate { "mutate" } else { "validate" }
}

fn count(kind: &str, step: &str, result: &str) {
    let labels = [
        ("kind", kind.to_owned()),
        ("step", step.to_owned()),
        ("result", result.to_owned()),
    ];
    metrics().reviews.get_or_create(&labels).inc();
}

fn route(step: &str) -> Option<(Kind, bool)> {
    let mutate = step
        .strip_prefix("mutate-apps-kruise-io-")
        .map(|kind| (kind, true));
    let (kind, mutate) = mutate.or_else(|| {
        step.strip_prefix("validate-apps-kruise-io-")
            .map(|kind| (kind, false))
    })?;
    Some((Kind::in_lower_case(kind)?, mutate))
}

async fn decide(look: &Look, kind: Kind, mutate: bool, asked: &Request) -> Decision {
    let too_long = match kind {
        Kind::CloneSet => cloneset::too_long(&asked.object),
        Kind::NodeImage => node_image::too_long(&asked.object),
        Kind::ImagePullJob | Kind::ContainerRecreateRequest => None,
    };
    if let Some(refusal) = too_long {
        return refusal;
    }
    match (kind, mutate) {
        (Kind::CloneSet, true) => cloneset::fill_in(asked, look.templates(asked).await),
        (Kind::CloneSet, false) => {
            let (strangers, before) = tokio::join!(look.no_pods(asked), look.before(asked));
            cloneset::check(asked, &strangers, before.as_ref())
        }
        (Kind::NodeImage, true) => node_image::fill_in(asked, look.cluster.clock.now()),
        (Kind::NodeImage, false) => node_image::check(asked),
        (Kind::ImagePullJob, true) => image_pull_job::fill_in(asked),
        (Kind::ImagePullJob, false) => image_pull_job::check(asked, &look.unknown_nodes(asked).await),
        (Kind::ContainerRecreateRequest, true) if asked.old.is_none() => match look.at_pod(asked).await {
            Ok(seen) => container_recreate_request::decide(asked, &seen),
            Err(why) => Decision::Deny {
                code: 500,
                why: format!("the Pod that the request is for could not be read, try again: {why}"),
            },
        },
        (Kind::ContainerRecreateRequest, _) => Decision::Allow {
            object: asked.object.to_json(),
            warnings: Vec::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_review_that_panics_fails_alone() {
        let router = Router::new()
            .route("/good", post(async || "good"))
            .route(
                "/{step}",
                post(async |Path(step): Path<String>| -> String { panic!("{step}") }),
            )
            .layer(from_fn(isolate));
        let ask = async |path: &str| {
            let request = axum::http::Request::post(path)
                .body(axum::body::Body::empty())
                .unwrap();
            tower::ServiceExt::oneshot(router.clone(), request)
                .await
                .unwrap()
                .status()
                .as_u16()
        };
        assert_eq!(ask("/mutate-apps-kruise-io-nodeimage").await, 500);
        assert_eq!(ask("/good").await, 200);
        let labels = [("kind", "nodeimage"), ("step", "mutate"), ("result", "failed")];
        let labels = labels.map(|(label, value)| (label, value.to_owned()));
        assert_eq!(metrics().reviews.get_or_create(&labels).get(), 1);
    }

    #[test]
    fn all_objects_of_a_list_are_converted_or_none() {
        let good = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" } });
        let to = "apps.kruise.io/v1alpha1";
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {} });
        let texts = [good, pod].map(|object| serde_json::value::to_raw_value(&object).unwrap());
        let [good, pod] = &texts;
        let all = convert_all(&[good, good], to, "[".to_owned(), 1000).unwrap();
        let objects: Value = serde_json::from_str(&(String::from_utf8(all).unwrap() + "]")).unwrap();
        assert_eq!(objects.as_array().unwrap().len(), 2);
        assert_eq!(objects[1]["apiVersion"], to);
        let why = convert_all(&[good, pod], to, String::new(), 1000).unwrap_err();
        assert!(why.message.contains("Pod"), "{why:?}");
        let why = convert_all(&[good, good], to, String::new(), 100).unwrap_err();
        assert!(why.message.contains("100 bytes are the most"), "{why:?}");
    }

    #[test]
    fn only_upstream_s_paths_are_served() {
        assert_eq!(
            route("mutate-apps-kruise-io-nodeimage"),
            Some((Kind::NodeImage, true))
        );
        assert_eq!(
            route("validate-apps-kruise-io-imagepulljob"),
            Some((Kind::ImagePullJob, false))
        );
        for other in ["mutate-pod", "mutate-apps-kruise-io-sidecarset", "", "nodeimage"] {
            assert_eq!(route(other), None);
        }
    }
}
