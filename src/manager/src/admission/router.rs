//! Routes each review to its decision and returns the answer. One route per kind and step.

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
use jiff::Timestamp;
use kube::core::Status;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::yield_now;

use super::body_limits::{BodyLimit, BodyPermits, ClientQuotas, limit_body, reject};
use super::connections::Caller;
use super::lookups::Lookups;
use super::pod::PodInjectionLookup;
use super::review::{Decision, Request};
use super::reviews_json::{self, Unreadable};
use super::{
    Options, cloneset, container_recreate_request, deletion, image_pull_job, node_image, pod, sidecar_set,
};
use kruise_api::convert::{self, partial::PartialObject};
use kruise_api::json::estimate_memory;
use kruise_api::validation::{MAX_FIELD_CHARS, truncate};
use kruise_api::{Kind, keys, names};
use kruise_ops::metrics::metrics;
use kruise_ops::{FeatureGate, FeatureGates, panics};
use kruise_workload::pod_admission::MutationError;

/// New and old object of at most 3 MiB each, and what surrounds them. Bytes.
const MAX_ADMISSION_BYTES: usize = 16 << 20;
/// A list of thousands of objects may be converted in one request. Bytes.
const MAX_CONVERSION_BYTES: usize = 64 << 20;
/// A larger list is converted on the blocking pool, because it may take seconds. Bytes.
const MAX_INLINE_CONVERSION: usize = 256 << 10;
/// Maximum number of copies of a review's objects in memory: of the request, the dry run, its answer, and the result.
const OBJECT_COPIES: usize = 4;
/// Memory limit of the objects of all reviews in progress, in bytes. The container has 512 MiB, of which conversions
/// may take some 300.
const MAX_REVIEW_MEMORY: usize = 160 << 20;
/// Maximum length of a rejection in the log, in characters.
const MAX_LOGGED_CHARS: usize = 500;
/// Metric label of reviews of a Namespace's deletion.
const NAMESPACE_KIND: &str = "namespace";
/// Metric label of reviews of new Pods.
const POD_KIND: &str = "pod";

/// Shared state of the handlers.
#[derive(Clone)]
struct HandlerState {
    lookups: Lookups,
    gates: Arc<FeatureGates>,
}

/// The paths are upstream's, because existing configurations may refer to them.
pub(super) fn router(lookups: Lookups, options: &Options) -> Router {
    let mut admission_limit = BodyLimit::new(2 * MAX_ADMISSION_BYTES, MAX_ADMISSION_BYTES);
    admission_limit.limit_memory(
        OBJECT_COPIES * reviews_json::MAX_OBJECT_MEMORY,
        MAX_REVIEW_MEMORY,
        review_memory,
        refuse_large_review,
    );
    let conversion_limit = BodyLimit::new(
        MAX_CONVERSION_BYTES + MAX_CONVERSION_BYTES / 8,
        MAX_CONVERSION_BYTES,
    );
    let state = HandlerState {
        lookups,
        gates: Arc::new(options.gates.clone()),
    };
    let admission = Router::new()
        .route("/{step}", post(handle_admission))
        .route(keys::VALIDATE_NAMESPACE_PATH, post(handle_deletion))
        .route(keys::MUTATE_POD_PATH, post(handle_pod))
        .route(&format!("{}/{{set}}", keys::MUTATE_POD_PATH), post(handle_pod))
        .layer(from_fn_with_state(admission_limit, limit_body))
        .with_state(state);
    let conversion = Router::new()
        .route(keys::CONVERT_PATH, post(handle_conversion))
        .layer(from_fn_with_state(conversion_limit, limit_body))
        .with_state(ConversionSlots::new());
    // Bodies have their own limit.
    conversion
        .merge(admission)
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(recover_panics))
}

/// Estimated memory of a review in progress, in bytes.
fn review_memory(text: &[u8]) -> usize {
    estimate_memory(text).saturating_mul(OBJECT_COPIES)
}

/// The answer to a review that takes too much memory: after an error, webhooks that fail open would store the object
/// unchecked. One that is being deleted is not kept from that. For a Pod, it is an error: the sets decide whether it is
/// created without sidecars.
fn refuse_large_review(path: &str, body: &[u8], why: String) -> Response {
    if path.starts_with(keys::MUTATE_POD_PATH) {
        return reject(StatusCode::PAYLOAD_TOO_LARGE, why);
    }
    let (review, is_deleted) = match reviews_json::parse_large(body) {
        Ok(read) => read,
        Err(why) => return reject_unreadable("other", false, why),
    };
    if is_deleted {
        return Json(review.allowed()).into_response();
    }
    let decision = Decision::Deny {
        code: StatusCode::PAYLOAD_TOO_LARGE.as_u16(),
        message: why,
    };
    record_decision("other", false, "", &decision);
    Json(review.with_decision(&Value::Null, decision)).into_response()
}

/// Recovers from a panic of one review. The API server takes the answer for a failed webhook, and applies the webhook's
/// `failurePolicy`.
async fn recover_panics(request: axum::extract::Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let step = path.trim_start_matches('/');
    match panics::catch_panic("admission", truncate(&path, MAX_FIELD_CHARS), next.run(request)).await {
        Ok(response) => response,
        Err(panicked) => {
            let (kind, step) = match parse_step(step) {
                Some((kind, mutate)) => (kind.info().lowercase, step_label(mutate)),
                None => ("other", "convert"),
            };
            count_review(kind, step, "failed");
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the review failed: {panicked}"),
            )
                .into_response()
        }
    }
}

/// Limits concurrent conversions, which are work without an await point.
#[derive(Clone)]
struct ConversionSlots {
    /// As many for each client as there are threads: a list of another client waits for that number of conversions, not
    /// for all.
    per_client: ClientQuotas,
    /// Serializes large lists. The memory of one object is bounded, and so is the memory of all when one list is
    /// converted at a time.
    large_lists: Arc<Semaphore>,
}

impl ConversionSlots {
    fn new() -> Self {
        Self {
            per_client: ClientQuotas::new(Handle::current().metrics().num_workers()),
            large_lists: Arc::new(Semaphore::new(1)),
        }
    }
}

async fn handle_conversion(
    State(slots): State<ConversionSlots>,
    Extension(permits): Extension<BodyPermits>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Response {
    if body.len() <= MAX_INLINE_CONVERSION {
        let _slot = slots
            .per_client
            .available_to(caller.network)
            .acquire_owned()
            .await;
        // Other ready tasks find no free slot either, and let others run until they get one.
        yield_now().await;
        return convert_review(&body);
    }
    let slot = slots.large_lists.acquire_owned().await;
    // The client may be disconnected when it ends; until then the work keeps its slot and its permits.
    let work = move || {
        let answer = convert_review(&body);
        drop((slot, permits));
        answer
    };
    let work = tokio::task::spawn_blocking(work).await;
    work.unwrap_or_else(|ended| match ended.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(ended) => (StatusCode::SERVICE_UNAVAILABLE, ended.to_string()).into_response(),
    })
}

fn convert_review(body: &[u8]) -> Response {
    let (review, objects, to) = match reviews_json::parse_conversion(body) {
        Ok((review, (objects, to))) => (review, objects, to),
        Err(Unreadable::Review(review, why)) => {
            let why = Status::failure(&why, "unreadable").with_code(422);
            return Json(review.conversion_failed(why)).into_response();
        }
        Err(Unreadable::NotAReview(code, why)) => return reject_non_review(code, why),
    };
    let (head, foot) = match review.clone().conversion_parts() {
        Ok(parts) => parts,
        Err(why) => return reject_non_review(StatusCode::BAD_REQUEST, why.to_string()),
    };
    match convert_all(&objects, &to, head, max_answer_bytes(body)) {
        Ok(mut answer) => {
            answer.extend_from_slice(foot.as_bytes());
            ([(CONTENT_TYPE, "application/json")], answer).into_response()
        }
        Err(why) => Json(review.conversion_failed(*why)).into_response(),
    }
}

/// Maximum bytes of the answer to a conversion: the content of annotations is in an object twice.
fn max_answer_bytes(body: &[u8]) -> usize {
    (2 * body.len()).saturating_add(1 << 20)
}

fn reject_non_review(code: StatusCode, why: String) -> Response {
    count_review("other", "read", "refused");
    (code, why).into_response()
}

/// Converts all objects or none: writes their JSON with commas after `head`, at most `max_bytes`.
fn convert_all(
    objects: &[&RawValue],
    to: &str,
    head: String,
    max_bytes: usize,
) -> Result<Vec<u8>, Box<Status>> {
    let (mut kind, mut answer) = ("other", head.into_bytes());
    let all = objects.iter().enumerate().try_for_each(|(index, text)| {
        let describe = |why: convert::Error| (why.to_string(), why.category());
        let object = PartialObject::parse(text, reviews_json::MAX_OBJECT_MEMORY).map_err(describe)?;
        if index == 0 {
            kind = kind_label(&object);
        }
        let object = object.convert(to).map_err(describe)?;
        if index > 0 {
            answer.push(b',');
        }
        object
            .write(&mut answer)
            .map_err(|why| (why.to_string(), "unreadable"))?;
        if answer.len() > max_bytes {
            let why = format!("the converted objects are too large: {max_bytes} bytes are the most");
            return Err((why, "too_large"));
        }
        Ok(())
    });
    count_review(kind, "convert", if all.is_ok() { "allowed" } else { "failed" });
    let Err((why, reason)) = all else {
        return Ok(answer);
    };
    let message = &*truncate(&why, MAX_LOGGED_CHARS);
    tracing::warn!(kind, why = message, "cannot convert");
    Err(Box::new(Status::failure(message, reason).with_code(422)))
}

/// The metric label of an object's kind; `other` unless it is one of ours, because clients control the value.
fn kind_label(object: &PartialObject<'_>) -> &'static str {
    let kind = object.kind().and_then(Kind::from_name);
    kind.map_or("other", |kind| kind.info().lowercase)
}

async fn handle_admission(
    State(state): State<HandlerState>,
    Extension(caller): Extension<Caller>,
    Path(step): Path<String>,
    body: Bytes,
) -> Response {
    let Some((kind, mutate)) = parse_step(&step) else {
        return (StatusCode::NOT_FOUND, format!("no webhook at /{step}")).into_response();
    };
    let (review, request) = match reviews_json::parse_admission(&body) {
        Ok(read) => read,
        Err(why) => return reject_unreadable(kind.info().lowercase, mutate, why),
    };
    // The answer may wait for other requests; the body is not needed meanwhile.
    drop(body);
    // A deletion needs no check.
    let Some(request) = request else {
        return Json(review.allowed()).into_response();
    };
    let decision = match disabling_gate(kind, &state.gates) {
        Some(gate) => Decision::Deny {
            code: 403,
            message: format!("feature gate {} of kruise-manager is off", gate.name()),
        },
        None => decide(&state.lookups.on_behalf_of(&caller), kind, mutate, &request).await,
    };
    record_decision(kind.info().lowercase, mutate, &request.namespace, &decision);
    Json(review.with_decision(&request.object, decision)).into_response()
}

async fn handle_deletion(
    State(state): State<HandlerState>,
    Extension(caller): Extension<Caller>,
    body: Bytes,
) -> Response {
    let (review, namespace) = match reviews_json::parse_deletion(&body) {
        Ok(read) => read,
        Err(why) => return reject_unreadable(NAMESPACE_KIND, false, why),
    };
    drop(body);
    let Some(name) = namespace.as_ref().and_then(deletion::protected_namespace) else {
        return Json(review.allowed()).into_response();
    };
    let decision = deletion::decide(
        name,
        state.lookups.on_behalf_of(&caller).deletion_blocker(name).await,
    );
    record_decision(NAMESPACE_KIND, false, name, &decision);
    Json(review.with_decision(&Value::Null, decision)).into_response()
}

async fn handle_pod(
    State(state): State<HandlerState>,
    Extension(caller): Extension<Caller>,
    set: Option<Path<String>>,
    body: Bytes,
) -> Response {
    let (review, request) = match reviews_json::parse_admission(&body) {
        Ok(read) => read,
        Err(why) => return reject_unreadable(POD_KIND, true, why),
    };
    drop(body);
    let Some(request) = request.filter(|request| request.old.is_none()) else {
        return Json(review.allowed()).into_response();
    };
    let lookups = state.lookups.on_behalf_of(&caller);
    let set = set.as_ref().map(|Path(set)| set.as_str());
    let mutated = match lookups.pod_injection(&request, set).await {
        Ok(lookup) => match mutate_pod(&request, lookup, set, lookups.cluster.clock.now()) {
            // The Pod itself is wrong, whatever the sets are.
            Err(why) if pod::is_about_pod(&why) => {
                let decision = Decision::Deny {
                    code: 422,
                    message: why.to_string(),
                };
                record_decision(POD_KIND, true, &request.namespace, &decision);
                return Json(review.with_decision(&request.object, decision)).into_response();
            }
            mutated => mutated.map_err(|why| why.to_string()),
        },
        Err(why) => Err(why),
    };
    match mutated {
        Ok(object) => {
            let decision = Decision::Allow {
                object,
                warnings: Vec::new(),
            };
            record_decision(POD_KIND, true, &request.namespace, &decision);
            Json(review.with_decision(&request.object, decision)).into_response()
        }
        // The API server takes this for a webhook that failed, and applies the failure policy of the set.
        Err(why) => {
            let why = &*truncate(&why, MAX_LOGGED_CHARS);
            tracing::warn!(namespace = request.namespace, why, "cannot inject SidecarSets");
            count_review(POD_KIND, step_label(true), "failed");
            (StatusCode::INTERNAL_SERVER_ERROR, why.to_owned()).into_response()
        }
    }
}

/// The changed Pod. If no set is the reason for the call, one that cannot be injected must not take the other changes
/// away.
fn mutate_pod(
    request: &Request,
    mut lookup: PodInjectionLookup,
    set: Option<&str>,
    now: Timestamp,
) -> Result<Value, MutationError> {
    let mutated = pod::mutate(request, &lookup, now);
    let is_for_sets = set.is_none_or(names::is_label);
    match mutated {
        Err(why) if !is_for_sets && !pod::is_about_pod(&why) => {
            tracing::warn!(namespace = request.namespace, %why, "cannot inject SidecarSets; making the other changes");
            lookup.sets.clear();
            pod::mutate(request, &lookup, now)
        }
        mutated => mutated,
    }
}

/// The answer to a body that is no review or cannot be processed.
fn reject_unreadable(kind: &str, mutate: bool, why: Unreadable) -> Response {
    match why {
        Unreadable::Review(review, why) => {
            let why = Decision::Deny {
                code: 422,
                message: why,
            };
            record_decision(kind, mutate, "", &why);
            Json(review.with_decision(&Value::Null, why)).into_response()
        }
        Unreadable::NotAReview(code, why) => reject_non_review(code, why),
    }
}

/// Counts a decision, and logs a rejection.
fn record_decision(kind: &str, mutate: bool, namespace: &str, decision: &Decision) {
    let step = step_label(mutate);
    match decision {
        Decision::Allow { .. } => count_review(kind, step, "allowed"),
        Decision::Deny { code, message: why } => {
            let why = &*truncate(why, MAX_LOGGED_CHARS);
            tracing::info!(kind, namespace, why, "refused");
            count_review(kind, step, if *code == 500 { "failed" } else { "refused" });
        }
    }
}

fn step_label(mutate: bool) -> &'static str {
    if mutate { "mutate" } else { "validate" }
}

fn count_review(kind: &str, step: &str, result: &str) {
    let labels = [
        ("kind", kind.to_owned()),
        ("step", step.to_owned()),
        ("result", result.to_owned()),
    ];
    metrics().reviews.get_or_create(&labels).inc();
}

/// The feature gate that disables a kind.
fn disabling_gate(kind: Kind, gates: &FeatureGates) -> Option<FeatureGate> {
    let required = match kind {
        // Objects of the last three are not reviewed.
        Kind::CloneSet
        | Kind::SidecarSet
        | Kind::ContainerRecreateJob
        | Kind::NodePodProbe
        | Kind::PodProbeMarker => return None,
        Kind::NodeImage | Kind::ContainerRecreateRequest => FeatureGate::KruiseDaemon,
        Kind::ImagePullJob | Kind::ImageListPullJob => FeatureGate::ImagePullJobGate,
    };
    (!gates.enabled(required)).then_some(required)
}

fn parse_step(step: &str) -> Option<(Kind, bool)> {
    let mutate = step
        .strip_prefix("mutate-apps-kruise-io-")
        .map(|kind| (kind, true));
    let (kind, mutate) = mutate.or_else(|| {
        step.strip_prefix("validate-apps-kruise-io-")
            .map(|kind| (kind, false))
    })?;
    let kind = Kind::from_lowercase(kind).filter(|kind| kind.info().webhook.is_some())?;
    Some((kind, mutate))
}

async fn decide(lookups: &Lookups, kind: Kind, mutate: bool, request: &Request) -> Decision {
    let oversized = match kind {
        Kind::CloneSet => cloneset::reject_oversized(&request.object),
        Kind::NodeImage => node_image::reject_oversized(&request.object),
        Kind::ImagePullJob
        | Kind::ImageListPullJob
        | Kind::ContainerRecreateRequest
        | Kind::ContainerRecreateJob
        | Kind::SidecarSet
        | Kind::NodePodProbe
        | Kind::PodProbeMarker => None,
    };
    if let Some(refusal) = oversized {
        return refusal;
    }
    match (kind, mutate) {
        (Kind::CloneSet, true) => cloneset::set_defaults(request, lookups.default_templates(request).await),
        (Kind::CloneSet, false) => {
            let (missing_pods, baseline) = tokio::join!(
                lookups.missing_pods_to_delete(request),
                lookups.in_place_baseline(request)
            );
            cloneset::validate_request(request, &missing_pods, baseline.as_ref())
        }
        (Kind::NodeImage, true) => node_image::set_defaults(request, lookups.cluster.clock.now()),
        (Kind::NodeImage, false) => node_image::validate_request(request),
        (Kind::ImagePullJob, true) => image_pull_job::set_defaults(request),
        (Kind::ImagePullJob, false) => {
            image_pull_job::validate_request(request, &lookups.missing_nodes(request).await)
        }
        (Kind::ImageListPullJob, true) => image_pull_job::set_list_defaults(request),
        (Kind::ImageListPullJob, false) => {
            image_pull_job::validate_list_request(request, &lookups.missing_nodes(request).await)
        }
        (Kind::SidecarSet, true) => sidecar_set::set_defaults(request),
        (Kind::SidecarSet, false) => match lookups.sidecar_set(request).await {
            Ok(lookup) => match sidecar_set::validate_request(request, &lookup) {
                allowed @ Decision::Allow { .. } => {
                    sidecar_set::with_dry_run(allowed, lookups.dry_run_sidecars(request).await)
                }
                refused => refused,
            },
            Err(why) => Decision::Deny {
                code: 500,
                message: format!("the SidecarSet could not be checked, try again: {why}"),
            },
        },
        (Kind::ContainerRecreateRequest, true) if request.old.is_none() => {
            match lookups.target_pod(request).await {
                Ok(lookup) => container_recreate_request::decide(request, &lookup),
                Err(why) => Decision::Deny {
                    code: 500,
                    message: format!("the Pod that the request is for could not be read, try again: {why}"),
                },
            }
        }
        (
            Kind::ContainerRecreateRequest
            | Kind::ContainerRecreateJob
            | Kind::NodePodProbe
            | Kind::PodProbeMarker,
            _,
        ) => Decision::Allow {
            object: request.object.to_json(),
            warnings: Vec::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use serde_json::json;

    use super::*;
    use crate::admission::review::Object;

    fn pod_request(labels: &Value) -> Request {
        let env = json!([{ "name": "KRUISE_CONTAINER_PRIORITY", "value": "1" }]);
        let containers = json!([
            { "name": "a", "image": "i", "env": env },
            { "name": "b", "image": "i" },
        ]);
        let metadata = json!({ "name": "p", "labels": labels });
        Request {
            object: Object::for_test(json!({ "metadata": metadata, "spec": { "containers": containers } })),
            old: None,
            namespace: "default".to_owned(),
            version: "v1".to_owned(),
            strict: false,
        }
    }

    fn lookup_of(spec: &Value) -> PodInjectionLookup {
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": "s" }, "spec": spec });
        PodInjectionLookup {
            sets: vec![Arc::new(serde_json::from_value(set).unwrap())],
            ..PodInjectionLookup::default()
        }
    }

    #[test]
    fn feature_gates_disable_kinds() {
        let disabled = |gates: &str| {
            let gates = FeatureGates::parse(gates).unwrap();
            let kinds = Kind::ALL.into_iter();
            kinds
                .filter_map(|kind| Some((kind, disabling_gate(kind, &gates)?)))
                .collect::<Vec<_>>()
        };
        let jobs = [Kind::ImagePullJob, Kind::ImageListPullJob];
        let [job, list] = jobs.map(|kind| (kind, FeatureGate::ImagePullJobGate));
        assert_eq!(disabled(""), []);
        assert_eq!(disabled("ImagePullJobGate=false"), [job, list]);
        let daemon = |kind| (kind, FeatureGate::KruiseDaemon);
        let without_daemon = [
            daemon(Kind::NodeImage),
            job,
            list,
            daemon(Kind::ContainerRecreateRequest),
        ];
        assert_eq!(disabled("KruiseDaemon=false"), without_daemon);
    }

    /// A set of one user must not take the launch priorities of another's Pod away.
    #[test]
    fn set_that_cannot_be_injected_leaves_launch_priorities() {
        let hot = json!({ "name": "side", "image": "i", "upgradeStrategy": { "upgradeType": "HotUpgrade" } });
        let spec = json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [hot] });
        let request = pod_request(&json!({ "app": "web" }));
        let mutated = |set| mutate_pod(&request, lookup_of(&spec), set, Timestamp::UNIX_EPOCH);
        for set in [None, Some("s")] {
            mutated(set).unwrap_err();
        }
        let pod = mutated(Some("launch.priority")).unwrap();
        let containers = pod["spec"]["containers"].as_array().unwrap();
        assert_eq!(containers.len(), 2, "{pod}");
        assert!(pod.to_string().contains("KRUISE_CONTAINER_BARRIER"), "{pod}");
    }

    #[test]
    fn namespace_matters_for_sets_that_select_it() {
        let spec = |selector: Value| {
            let mut spec = json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [] });
            spec["namespaceSelector"] = selector;
            lookup_of(&spec).sets
        };
        let (web, other) = (pod_request(&json!({ "app": "web" })), pod_request(&json!({})));
        let sets = spec(json!({ "matchLabels": { "team": "a" } }));
        let rest = |request: &Request, mut sets: Vec<_>, reason| {
            let is_complete = pod::remove_undecided(request, &mut sets, reason);
            (is_complete, sets.len())
        };
        assert_eq!(rest(&web, sets.clone(), None), (false, 0));
        assert_eq!(rest(&web, sets.clone(), Some("s")), (false, 0));
        // Another set, or launch priorities.
        for reason in ["t", "launch.priority"] {
            assert_eq!(rest(&web, sets.clone(), Some(reason)), (true, 0));
        }
        assert_eq!(rest(&other, sets, None), (true, 1));
        assert_eq!(rest(&web, spec(Value::Null), None), (true, 1));
    }

    #[tokio::test]
    async fn panicking_review_fails_alone() {
        let router = Router::new()
            .route("/good", post(async || "good"))
            .route(
                "/{step}",
                post(async |Path(step): Path<String>| -> String { panic!("{step}") }),
            )
            .layer(from_fn(recover_panics));
        let status_of = async |path: &str| {
            let request = axum::http::Request::post(path)
                .body(axum::body::Body::empty())
                .unwrap();
            tower::ServiceExt::oneshot(router.clone(), request)
                .await
                .unwrap()
                .status()
                .as_u16()
        };
        assert_eq!(status_of("/mutate-apps-kruise-io-nodeimage").await, 500);
        assert_eq!(status_of("/good").await, 200);
        let labels = [("kind", "nodeimage"), ("step", "mutate"), ("result", "failed")];
        let labels = labels.map(|(label, value)| (label, value.to_owned()));
        assert_eq!(metrics().reviews.get_or_create(&labels).get(), 1);
    }

    #[test]
    fn list_conversion_is_all_or_nothing() {
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
    fn only_upstream_paths_are_served() {
        assert_eq!(
            parse_step("mutate-apps-kruise-io-nodeimage"),
            Some((Kind::NodeImage, true))
        );
        assert_eq!(
            parse_step("validate-apps-kruise-io-imagepulljob"),
            Some((Kind::ImagePullJob, false))
        );
        for other in ["mutate-pod", "mutate-apps-kruise-io-daemonset", "", "nodeimage"] {
            assert_eq!(parse_step(other), None);
        }
    }
}
