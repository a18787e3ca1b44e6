//! Reviews that mean harm, answered on a stack far smaller than any thread of ours has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::convert::Infallible;
use std::future::pending;

use axum::Router;
use axum::body::{Body, to_bytes};
use futures::{StreamExt, stream};
use http::Request;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;
use tower::ServiceExt;

use super::look::Look;
use super::{Options, review};
use crate::api::keys;
use crate::cluster::pod_template::Defaults;
use crate::cluster::{self, Cluster};

/// Where it is exceeded, the process of the tests aborts. The main thread has 8 MiB.
const STACK: usize = 512 << 10;

/// What is looked at of an answer; the object in it may be deeper than can be read.
#[derive(Debug, Default, Deserialize)]
struct Said {
    response: Response,
}

#[derive(Debug, Default, Deserialize)]
struct Response {
    uid: String,
    allowed: Option<bool>,
    #[serde(alias = "result")]
    status: Option<kube::core::Status>,
}

impl Said {
    fn message(&self) -> &str {
        self.response.status.as_ref().map_or("", |status| &status.message)
    }
}

/// What the webhook server answers to these bodies, one after the other.
fn answers(bodies: Vec<(String, String)>) -> Vec<(u16, Said)> {
    let all = async |router: Router| {
        let mut answers = Vec::new();
        for (path, body) in bodies {
            answers.push(answer(&router, &path, Body::from(body)).await);
        }
        answers
    };
    on_a_small_stack(all)
}

/// Asks the webhook server, with no API server for it to ask.
fn on_a_small_stack<T: Send + 'static>(ask: impl AsyncFnOnce(Router) -> T + Send + 'static) -> T {
    let small = std::thread::Builder::new().stack_size(STACK);
    let thread = small.spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(Box::pin(async { ask(router().await).await }))
    });
    thread.unwrap().join().unwrap()
}

async fn router() -> Router {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    let nowhere = json!({
        "current-context": "c", "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "clusters": [{ "name": "c", "cluster": { "server": "http://127.0.0.1:1" } }],
        "users": [{ "name": "u", "user": {} }],
    });
    std::fs::write(&kubeconfig, nowhere.to_string()).unwrap();
    let to = cluster::Options {
        kubeconfig: Some(kubeconfig),
        component: "test".into(),
        host: None,
    };
    let cluster = Cluster::connect(&to).await.unwrap();
    let options = Options {
        serve: true,
        manage: true,
        namespace: "ns".into(),
        host: None,
        port: 0,
        defaults: Defaults::default(),
        off: Vec::new(),
    };
    let (look, _) = Look::new(&cluster, options.defaults);
    review::router(look, &options)
}

async fn answer(router: &Router, path: &str, body: Body) -> (u16, Said) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(body).unwrap();
    let answer = Box::pin(router.clone().oneshot(request)).await.unwrap();
    let status = answer.status().as_u16();
    let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&text).unwrap_or_default())
}

/// The reviews of an update from `old` to `object` (JSON texts), as both webhooks of the kind get them.
fn reviews(kind: &str, object: &str, old: &str) -> Vec<(String, String)> {
    let body = format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u",
            "kind":{{"version":"v1beta1"}},"namespace":"ns","object":{object},"oldObject":{old}}}}}"#
    );
    ["mutate", "validate"]
        .map(|step| (format!("/{step}-apps-kruise-io-{kind}"), body.clone()))
        .into()
}

fn conversion(objects: &[&str], to: &str) -> (String, String) {
    let body = format!(
        r#"{{"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview","request":{{"uid":"u",
            "desiredAPIVersion":"apps.kruise.io/{to}","objects":[{}]}}}}"#,
        objects.join(",")
    );
    (keys::CONVERT_PATH.into(), body)
}

/// Lists and objects in turn around `inmost`.
fn nested(levels: usize, inmost: &str) -> String {
    let (open, close) = (r#"[{"a":"#, "}]");
    format!("{}{inmost}{}", open.repeat(levels / 2), close.repeat(levels / 2))
}

/// A CloneSet with these JSON texts in its template and its annotations.
fn clone_set(template: &str, annotations: &str) -> String {
    format!(
        r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet",
            "metadata":{{"name":"web","uid":"u","annotations":{annotations}}},
            "spec":{{"selector":{{"matchLabels":{{"app":"web"}}}},
                "updateStrategy":{{"rollingUpdate":{{"podUpdatePolicy":"InPlaceOnly"}}}},
                "template":{{"metadata":{{"labels":{{"app":"web"}}}},"spec":{template}}}}}}}"#
    )
}

#[test]
fn the_deepest_that_can_be_read_is_compared_and_answered() {
    // Five levels are around it: review, request, object, spec and template.
    let [one, other] = ["1", "2"].map(|inmost| clone_set(&nested(122, inmost), "{}"));
    for (status, said) in answers(reviews("cloneset", &one, &other)) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
        let message = said.message();
        assert!(message.is_empty() || message.contains("InPlaceOnly"), "{message}");
    }
}

#[test]
fn what_is_deeper_is_refused_whatever_it_is() {
    let deep = clone_set(&nested(200_000, "1"), "{}");
    let mut bodies = reviews("cloneset", &deep, "null");
    bodies.extend(reviews("imagepulljob", "null", &deep));
    bodies.extend(reviews("containerrecreaterequest", &deep, &deep));
    for (status, said) in answers(bodies) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
        assert_eq!(said.response.allowed, Some(false));
        assert!(said.message().contains("nested"), "{said:?}");
    }
    let bodies = vec![
        conversion(&[&deep], "v1alpha1"),
        ("/convert".into(), nested(200_000, "1")),
    ];
    let answers = answers(bodies);
    assert_eq!((answers[0].0, answers[1].0), (200, 400));
    assert!(answers[0].1.message().contains("recursion"), "{answers:?}");
}

/// What annotations carry between the versions becomes part of the object, and may be as deep by itself.
#[test]
fn depth_that_comes_out_of_annotations_is_converted() {
    let list = nested(124, "1");
    let text = json!({ keys::CRR_CONDITIONS: list, keys::CRR_SYNC_CONTAINER_STATUSES: list });
    let request = format!(
        r#"{{"apiVersion":"apps.kruise.io/v1alpha1","kind":"ContainerRecreateRequest",
            "metadata":{{"name":"r","annotations":{text}}},"spec":{{"podName":"p"}}}}"#
    );
    let set = clone_set(&nested(120, "1"), "{}");
    let bodies = vec![
        conversion(&[&request], "v1beta1"),
        conversion(&[&set, &set], "v1alpha1"),
    ];
    for (status, said) in answers(bodies) {
        assert_eq!(status, 200);
        let result = said.response.status.unwrap();
        assert!(result.is_success(), "{result:?}");
    }
}

#[test]
fn size_is_no_depth() {
    let many =
        |count: usize, one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<Vec<_>>().join(",");
    let containers = many(5_000, &|n| format!(r#"{{"name":"c{n}","image":"image:{n}"}}"#));
    let containers = clone_set(&format!(r#"{{"containers":[{containers}]}}"#), "{}");
    let labels = many(20_000, &|n| format!(r#""l{n}":"{n}""#));
    let labels = clone_set(&format!(r#"{{"nodeSelector":{{{labels}}}}}"#), "{}");
    let names = many(20_000, &|n| format!(r#""n{n}""#));
    let names =
        format!(r#"{{"kind":"ImagePullJob","spec":{{"image":"i","selector":{{"names":[{names}]}}}}}}"#);
    let mut bodies = reviews("cloneset", &containers, &labels);
    bodies.extend(reviews("imagepulljob", &names, "null"));
    bodies.push(conversion(&[&containers, &labels], "v1alpha1"));
    for (status, said) in answers(bodies) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
    }
}

/// Where the API server cannot be asked for the stored template, unknown fields are compared as they are.
#[test]
fn a_key_as_long_as_an_object_is_not_repeated_for_each_field_below_it() {
    let long = "k".repeat(1 << 17);
    let [one, other] = ["1", "2"].map(|value| {
        let fields: Vec<_> = (0..2_000).map(|n| format!(r#""f{n}":{value}"#)).collect();
        clone_set(&format!(r#"{{"{long}":{{{}}}}}"#, fields.join(",")), "{}")
    });
    let answers = answers(reviews("cloneset", &one, &other));
    let why = answers[1].1.message();
    assert!(
        why.contains("InPlaceOnly") && why.len() < 2 << 20,
        "{}",
        why.len()
    );
}

#[test]
fn each_sort_of_review_has_a_room_of_its_own() {
    on_a_small_stack(async |router| {
        let padded = |text: String, bytes: usize| Body::from(" ".repeat(bytes - text.len()) + &text);
        let [_, (admit, review)] = reviews("cloneset", &clone_set("{}", "{}"), "null")
            .try_into()
            .unwrap();
        let (convert, objects) = conversion(&[&clone_set("{}", "{}")], "v1alpha1");
        let ask = async |path: &str, text: &String, bytes| {
            let (status, _) = answer(&router, path, padded(text.clone(), bytes)).await;
            status
        };
        assert_eq!(ask(&admit, &review, 16 << 20).await, 200);
        assert_eq!(ask(&admit, &review, (16 << 20) + 1).await, 413);
        // Two of the largest texts have arrived, and do not end.
        let (taken, mut news) = mpsc::unbounded_channel();
        for _ in 0..2 {
            let (router, admit, taken) = (router.clone(), admit.clone(), taken.clone());
            let end = stream::once(async move {
                taken.send(()).unwrap();
                pending().await
            });
            let text = stream::iter([Ok::<_, Infallible>(vec![b' '; 16 << 20])]).chain(end);
            tokio::spawn(async move { answer(&router, &admit, Body::from_stream(text)).await });
            news.recv().await.unwrap();
        }
        assert_eq!(ask(&admit, &review, review.len()).await, 429);
        assert_eq!(ask(&convert, &objects, 64 << 20).await, 200);
        assert_eq!(ask(&convert, &objects, (64 << 20) + 1).await, 413);
    });
}
