//! Stores fed by an API server that fails, is slow, or does not answer, in paused time.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use futures::stream;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::service_fn;

use super::*;
use crate::retry::MAX_RETRY_AFTER;
use crate::{Cluster, Key, Store, watch::new_reflector};
use kruise_ops::Watches;

/// The response to a request.
#[derive(Clone, Debug)]
enum FakeResponse {
    /// This status code and object.
    Object(u16, Value),
    /// A list of ConfigMaps of these names, with a token for the next page if there is one.
    List(&'static [&'static str], Option<&'static str>),
    /// A watch with these events, which then ends.
    WatchThenClose(Vec<Value>),
    /// A watch with these events, which then is silent.
    WatchThenIdle(Vec<Value>),
    /// The connection is accepted, and nothing is sent.
    NoResponse,
}

use FakeResponse::{List, NoResponse, Object, WatchThenClose, WatchThenIdle};

/// The responses in turn, the last of them repeated, and the requests with their times since the start.
struct FakeApiServer {
    responses: Vec<FakeResponse>,
    requests: Vec<(Duration, String)>,
    start: Instant,
}

impl FakeApiServer {
    fn respond(&mut self, uri: &http::Uri) -> FakeResponse {
        let nth = self.requests.len().min(self.responses.len() - 1);
        self.requests.push((self.start.elapsed(), uri.to_string()));
        self.responses[nth].clone()
    }
}

fn config_map(name: &str, version: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "ns", "resourceVersion": version } })
}

fn event(event_type: &str, object: &Value) -> Value {
    json!({ "type": event_type, "object": object })
}

fn error_response(code: u16, message: &str, retry_after: u32) -> FakeResponse {
    Object(
        code,
        json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": "Reason",
            "message": message, "details": { "retryAfterSeconds": retry_after } }),
    )
}

fn expired_event() -> Value {
    event(
        "ERROR",
        &json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version" }),
    )
}

/// The body of a response.
type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

fn json_body(object: &Value) -> ResponseBody {
    Full::from(object.to_string()).boxed_unsync()
}

fn watch_body(events: &[Value], closes: bool) -> ResponseBody {
    let lines: Vec<_> = events
        .iter()
        .map(|event| {
            // In the API server's format: the type first.
            let line = format!("{{\"type\":{},\"object\":{}}}\n", event["type"], event["object"]);
            Ok::<_, Infallible>(Frame::data(Bytes::from(line)))
        })
        .collect();
    let lines = stream::iter(lines);
    if closes {
        StreamBody::new(lines).boxed_unsync()
    } else {
        StreamBody::new(lines.chain(stream::pending())).boxed_unsync()
    }
}

fn client(server: &Arc<Mutex<FakeApiServer>>) -> kube::Client {
    let server = Arc::clone(server);
    let service = service_fn(move |request: Request<Body>| {
        let response = server.lock().unwrap().respond(request.uri());
        async move {
            let (code, body) = match response {
                Object(code, object) => (code, json_body(&object)),
                List(names, more) => {
                    let items: Vec<Value> = names.iter().map(|name| config_map(name, "5")).collect();
                    let list = json!({ "apiVersion": "v1", "kind": "ConfigMapList", "items": items,
                        "metadata": { "resourceVersion": "5", "continue": more } });
                    (200, json_body(&list))
                }
                WatchThenClose(events) => (200, watch_body(&events, true)),
                WatchThenIdle(events) => (200, watch_body(&events, false)),
                NoResponse => return std::future::pending().await,
            };
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    });
    kube::Client::new(service, "default")
}

/// A store that is kept up to date, the state of its watch, and the requests.
struct Fixture {
    store: Store<String>,
    watches: Watches,
    server: Arc<Mutex<FakeApiServer>>,
    task: tokio::task::JoinHandle<()>,
}

impl Fixture {
    fn new(answers: Vec<FakeResponse>) -> Self {
        Self::with_watch(answers, Watches::register)
    }

    fn with_watch(answers: Vec<FakeResponse>, register: fn(&Watches, &str) -> WatchHandle) -> Self {
        let server = Arc::new(Mutex::new(FakeApiServer {
            responses: answers,
            requests: Vec::new(),
            start: Instant::now(),
        }));
        let watches = Watches::default();
        let watch = register(&watches, "ConfigMap");
        let api = Api::<ConfigMap>::namespaced(client(&server), "ns");
        let (store, task) = new_reflector(api, ListParams::default(), None, watch, |c: ConfigMap| {
            c.metadata.resource_version
        });
        Self {
            store,
            watches,
            server,
            task: tokio::spawn(task),
        }
    }

    /// Advances the time, and runs everything that happens in it.
    async fn advance(&self, seconds: u64) {
        sleep(Duration::from_secs(seconds)).await;
        assert!(!self.task.is_finished());
    }

    /// The requests so far with their times in whole seconds: `list` or `watch FROM`.
    fn requests(&self) -> Vec<(u64, String)> {
        let part = |uri: &str, name: &str| {
            let (_, rest) = uri.split_once(&format!("{name}="))?;
            Some(rest.split('&').next().unwrap_or_default().to_owned())
        };
        let server = self.server.lock().unwrap();
        let read = |(at, uri): &(Duration, String)| {
            let what = match part(uri, "watch") {
                Some(_) => format!("watch {}", part(uri, "resourceVersion").unwrap()),
                None => part(uri, "continue").map_or("list".to_owned(), |token| format!("list {token}")),
            };
            (at.as_secs(), what)
        };
        server.requests.iter().map(read).collect()
    }

    fn request_names(&self) -> Vec<String> {
        self.requests().into_iter().map(|(_, what)| what).collect()
    }

    /// The limits of the lists that were requested.
    fn limits(&self) -> Vec<String> {
        let server = self.server.lock().unwrap();
        let uris = server.requests.iter().map(|(_, uri)| uri);
        uris.filter_map(|uri| Some(uri.split_once("limit=")?.1.split('&').next()?.to_owned()))
            .collect()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .store
            .entries()
            .into_iter()
            .map(|(key, _)| key.name)
            .collect();
        names.sort();
        names
    }

    fn readiness_error(&self) -> String {
        self.watches.readiness().unwrap().unwrap_err()
    }
}

#[tokio::test(start_paused = true)]
async fn failing_list_is_retried_with_backoff() {
    let fixture = Fixture::new(vec![error_response(403, "configmaps is forbidden", 0)]);
    fixture.advance(600).await;
    let requests = fixture.requests();
    // Nine while the pause doubles from 0.2 s to 30 s, and then one every 15 s to 45 s.
    assert!(
        (18..=48).contains(&requests.len()),
        "{} lists: {requests:?}",
        requests.len()
    );
    assert!(
        fixture.readiness_error().contains("ConfigMap is not listed yet"),
        "{}",
        fixture.readiness_error()
    );
    assert!(
        fixture.readiness_error().contains("configmaps is forbidden"),
        "{}",
        fixture.readiness_error()
    );
}

#[tokio::test(start_paused = true)]
async fn failing_page_is_retried_with_backoff_from_its_token() {
    let fixture = Fixture::new(vec![List(&["a"], Some("more")), error_response(500, "broken", 0)]);
    fixture.advance(600).await;
    let names = fixture.request_names();
    assert!(
        (18..=49).contains(&names.len()),
        "{} requests: {names:?}",
        names.len()
    );
    assert_eq!(names[0], "list");
    assert!(names[1..].iter().all(|what| what == "list more"), "{names:?}");
    assert!(!fixture.store.is_synced());

    // A large cluster, whose API server rejects every second request.
    let mut answers = Vec::new();
    for _ in 0..300 {
        answers.extend([List(&["a"], Some("more")), error_response(429, "later", 1)]);
    }
    answers.extend([List(&["b"], None), WatchThenIdle(vec![])]);
    let fixture = Fixture::new(answers);
    fixture.advance(600).await;
    assert_eq!(fixture.names(), ["a", "b"]);
    let names = fixture.request_names();
    assert_eq!(names.iter().filter(|what| *what == "list").count(), 1);
}

/// Readiness and metric show that a store makes no progress, whatever responses come in between.
#[tokio::test(start_paused = true)]
async fn store_is_stale_when_no_list_completes() {
    let mut later_page = vec![
        List(&["a"], None),
        WatchThenClose(vec![expired_event()]),
        List(&["a"], Some("more")),
    ];
    later_page.push(error_response(500, "broken", 0));
    for answers in [later_page, vec![List(&["a"], None), WatchThenClose(vec![])]] {
        let fixture = Fixture::new(answers);
        fixture.advance(200).await;
        assert_eq!(fixture.watches.readiness(), Some(Ok("ConfigMap".to_owned())));
        fixture.advance(100).await;
        let problem = fixture.readiness_error();
        assert!(
            problem.starts_with("ConfigMap is stale: nothing heard for "),
            "{problem}"
        );
    }
}

/// Twenty objects of 1.5 MB fit only in pages of at most eight.
#[tokio::test(start_paused = true)]
async fn page_size_shrinks_for_large_objects() {
    let large = |name: &str| {
        let mut object = config_map(name, "5");
        object["data"] = json!({ "a": "x".repeat(1_500_000) });
        object
    };
    let page = |count: usize, more: Option<&str>| {
        let items: Vec<Value> = (0..count).map(|i| large(&format!("o{i}"))).collect();
        Object(
            200,
            json!({ "apiVersion": "v1", "kind": "ConfigMapList", "items": items,
            "metadata": { "resourceVersion": "5", "continue": more } }),
        )
    };
    let fixture = Fixture::new(vec![
        page(20, None),
        page(20, None),
        page(20, None),
        page(5, Some("more")),
        page(2, None),
        WatchThenIdle(vec![]),
    ]);
    fixture.advance(10).await;
    assert_eq!(fixture.names(), ["o0", "o1", "o2", "o3", "o4"]);
    assert_eq!(fixture.limits(), ["500", "125", "31", "7", "7"]);
}

/// A tenant's large object must not make the rest of a list a request for each object.
#[tokio::test(start_paused = true)]
async fn page_size_grows_again_behind_large_objects() {
    let page = |names: &[&str], bytes: usize, more: Option<&str>| {
        let objects = names.iter().map(|name| {
            let mut object = config_map(name, "5");
            object["data"] = json!({ "a": "x".repeat(bytes) });
            object
        });
        Object(
            200,
            json!({ "apiVersion": "v1", "kind": "ConfigMapList", "items": objects.collect::<Vec<_>>(),
            "metadata": { "resourceVersion": "5", "continue": more } }),
        )
    };
    let large = || page(&["large"], 9_000_000, Some("more"));
    let fixture = Fixture::new(vec![
        large(),
        large(),
        large(),
        large(),
        large(),
        page(&["a"], 10, Some("more")),
        page(&["b", "c"], 10, Some("more")),
        page(&["d"], 10, None),
        WatchThenIdle(vec![]),
    ]);
    fixture.advance(10).await;
    assert_eq!(fixture.names(), ["a", "b", "c", "d", "large"]);
    assert_eq!(fixture.limits(), ["500", "125", "31", "7", "1", "1", "2", "4"]);
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_the_api_server_is_honoured() {
    let fixture = Fixture::new(vec![
        error_response(429, "later", 40),
        List(&["a"], None),
        WatchThenIdle(vec![]),
    ]);
    fixture.advance(39).await;
    assert_eq!(fixture.request_names(), ["list"]);
    fixture.advance(22).await;
    assert_eq!(fixture.request_names(), ["list", "list", "watch 5"]);
    assert_eq!(fixture.names(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn unanswered_list_times_out_after_a_minute() {
    let fixture = Fixture::new(vec![
        NoResponse,
        List(&["a"], Some("more")),
        NoResponse,
        List(&["b"], None),
        NoResponse,
    ]);
    fixture.advance(59).await;
    assert_eq!(fixture.request_names(), ["list"]);
    fixture.advance(3).await;
    assert_eq!(fixture.request_names(), ["list", "list", "list more"]);
    assert!(
        fixture
            .readiness_error()
            .starts_with("ConfigMap is not listed yet"),
        "{}",
        fixture.readiness_error()
    );
    fixture.advance(61).await;
    assert_eq!(
        fixture.request_names(),
        ["list", "list", "list more", "list more", "watch 5"]
    );
    assert_eq!(fixture.names(), ["a", "b"]);
    assert_eq!(fixture.watches.readiness(), Some(Ok("ConfigMap".to_owned())));

    // The start of the watch is not answered either, again and again.
    fixture.advance(250).await;
    let problem = fixture.readiness_error();
    assert!(
        problem.starts_with("ConfigMap is stale: nothing heard for 25")
            && problem.contains("did not answer watch ConfigMap within 60s"),
        "{problem}"
    );
    fixture
        .server
        .lock()
        .unwrap()
        .responses
        .push(WatchThenIdle(vec![]));
    let patience = 100;
    fixture.advance(patience).await;
    assert_eq!(
        fixture.watches.readiness(),
        Some(Ok("ConfigMap".to_owned())),
        "readiness comes back"
    );
}

#[tokio::test(start_paused = true)]
async fn idle_watch_is_restarted_from_its_resource_version() {
    let bookmark = event("BOOKMARK", &config_map("", "7"));
    let changes = vec![event("ADDED", &config_map("b", "6")), bookmark];
    let fixture = Fixture::new(vec![
        List(&["a"], None),
        WatchThenIdle(changes),
        WatchThenIdle(vec![]),
    ]);
    fixture.advance(149).await;
    assert_eq!(fixture.request_names(), ["list", "watch 5"]);
    assert_eq!(fixture.names(), ["a", "b"]);
    fixture.advance(2).await;
    assert_eq!(fixture.request_names(), ["list", "watch 5", "watch 7"]);
    fixture.advance(610).await;
    assert_eq!(fixture.request_names()[3..], ["watch 7"; 4]);
    assert_eq!(
        fixture.watches.readiness(),
        Some(Ok("ConfigMap".to_owned())),
        "silent is not stale"
    );
}

#[tokio::test(start_paused = true)]
async fn watches_that_close_at_once_back_off() {
    let fixture = Fixture::new(vec![List(&["a"], None), WatchThenClose(vec![])]);
    fixture.advance(600).await;
    let request_count = fixture.requests().len();
    assert!((19..=49).contains(&request_count), "{request_count} requests");
}

#[tokio::test(start_paused = true)]
async fn expired_resource_version_relists_with_backoff() {
    let mut answers = vec![List(&["a"], None)];
    // Unavailable for a while: the pause is long by then.
    answers.extend(vec![error_response(503, "away", 0); 12]);
    answers.extend([WatchThenClose(vec![expired_event()]), List(&["b"], None)]);
    answers.extend([WatchThenIdle(vec![event("DELETED", &config_map("b", "9"))])]);
    let fixture = Fixture::new(answers);
    fixture.advance(400).await;
    let requests = fixture.requests();
    let (gone, listed) = (&requests[13], &requests[14]);
    assert_eq!(listed.1, "list");
    assert!(listed.0 - gone.0 <= 1, "{requests:?}");
    assert!(fixture.names().is_empty(), "{:?}", fixture.names());
    assert_eq!(fixture.request_names()[15..17], ["watch 5", "watch 9"]);

    // An API server that reports an expired version every time.
    let mut answers = Vec::new();
    for _ in 0..100 {
        answers.extend([List(&["a"], None), WatchThenClose(vec![expired_event()])]);
    }
    let fixture = Fixture::new(answers);
    fixture.advance(600).await;
    let request_count = fixture.requests().len();
    assert!((36..=98).contains(&request_count), "{request_count} requests");
}

#[tokio::test(start_paused = true)]
async fn changes_arrive_in_order_and_progress_resets_backoff() {
    let broken = "this is no object";
    let changes = vec![
        event("ADDED", &config_map("b", "6")),
        event("MODIFIED", &config_map("a", "7")),
        event("DELETED", &config_map("b", "8")),
        json!(broken),
    ];
    let mut answers = vec![error_response(500, "broken", 0); 9];
    answers.extend([List(&["a"], None), WatchThenClose(changes), WatchThenIdle(vec![])]);
    let fixture = Fixture::new(answers);
    fixture.advance(300).await;
    assert_eq!(fixture.names(), ["a"]);
    let kept = fixture.store.get(&Key::namespaced("ns", "a")).unwrap();
    assert_eq!(*kept, "7");
    let requests = fixture.requests();
    let again = requests.iter().position(|(_, what)| what == "watch 8").unwrap();
    assert!(requests[again].0 - requests[again - 1].0 <= 1, "{requests:?}");
}

#[test]
fn retry_delay_doubles_up_to_maximum_with_jitter() {
    for nth in 0..40 {
        let doubled = RETRY_BACKOFF.delay(nth);
        let pauses: Vec<Duration> = (0..50)
            .map(|_| retry_delay(nth, None, &RandomState::new()))
            .collect();
        let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        assert!(
            *least >= doubled / 2 && *most <= doubled * 3 / 2,
            "{nth}: {least:?} to {most:?}"
        );
        assert!(*most - *least > doubled / 10, "{nth}: not spread");
        let delay = retry_delay(nth, Some(MAX_RETRY_AFTER), &RandomState::new());
        assert!(
            (MAX_RETRY_AFTER..=MAX_RETRY_AFTER * 3 / 2).contains(&delay),
            "{delay:?}"
        );
    }
}

/// The kind or the role is missing at first, is there later, and is removed again.
#[tokio::test(start_paused = true)]
async fn optional_kind_counts_for_readiness_while_it_is_served() {
    let (missing, forbidden) = (
        error_response(404, "not found", 0),
        error_response(403, "forbidden", 0),
    );
    let served = [List(&["a"], None), WatchThenIdle(Vec::new())];
    let answers = [vec![missing; 2], served.to_vec(), vec![forbidden]].concat();
    let fixture = Fixture::with_watch(answers, Watches::register_optional);
    assert_eq!(fixture.watches.readiness(), None);
    fixture.advance(10).await;
    assert_eq!(fixture.watches.readiness(), Some(Ok("ConfigMap".to_owned())));
    fixture.advance(1000).await;
    assert_eq!((fixture.watches.readiness(), fixture.store.len()), (None, 1));
}

/// The pages of a long list that an overloaded API server sends slowly, until their token expires.
#[tokio::test(start_paused = true)]
async fn pages_become_longer_when_their_token_expires() {
    let expired = || error_response(410, "the provided continue parameter is too old", 0);
    let fixture = Fixture::new(vec![
        List(&["a"], Some("more")),
        expired(),
        List(&["a"], Some("more")),
        expired(),
        List(&["a", "b"], None),
        WatchThenClose(vec![expired_event()]),
        List(&["c"], None),
        WatchThenIdle(vec![]),
    ]);
    fixture.advance(60).await;
    assert_eq!(fixture.names(), ["c"]);
    assert_eq!(fixture.limits(), ["500", "500", "2000", "2000", "8000", "500"]);
}

#[tokio::test(start_paused = true)]
async fn watches_that_began_together_end_at_different_times() {
    let mut timeouts: Vec<u32> = (0..50)
        .map(|_| watch_timeout_seconds(&RandomState::new()))
        .collect();
    timeouts.sort_unstable();
    assert!(timeouts[0] >= 200 && timeouts[49] <= 290, "{timeouts:?}");
    timeouts.dedup();
    assert!(timeouts.len() > 10, "{timeouts:?}");

    let fixture = Fixture::new(vec![List(&["a"], None), WatchThenIdle(vec![])]);
    fixture.advance(1000).await;
    let server = fixture.server.lock().unwrap();
    let requested: std::collections::BTreeSet<&str> = server.requests[1..]
        .iter()
        .map(|(_, uri)| {
            uri.split_once("timeoutSeconds=")
                .unwrap()
                .1
                .split('&')
                .next()
                .unwrap()
        })
        .collect();
    assert!(requested.len() > 1, "{requested:?}");
}

/// The account of the webhooks may create no events; the controllers watch the same kinds and publish them.
#[tokio::test(start_paused = true)]
async fn stores_of_webhooks_publish_no_event_about_an_unreadable_object() {
    for is_of_webhooks in [true, false] {
        let mut unreadable = config_map("a", "5");
        unreadable["data"] = json!(3);
        let list = json!({ "apiVersion": "v1", "kind": "ConfigMapList", "items": [unreadable],
            "metadata": { "resourceVersion": "5" } });
        let server = Arc::new(Mutex::new(FakeApiServer {
            responses: vec![Object(200, list), WatchThenIdle(Vec::new())],
            requests: Vec::new(),
            start: Instant::now(),
        }));
        let cluster = Cluster::from_client(client(&server));
        let api = Api::<ConfigMap>::namespaced(cluster.client.clone(), "ns");
        let (store, task) = if is_of_webhooks {
            cluster.reflector_for_start(api, ListParams::default(), Some::<ConfigMap>)
        } else {
            cluster.reflector(api, ListParams::default(), Some::<ConfigMap>)
        };
        let task = tokio::spawn(task);
        store.wait_until_synced().await;
        sleep(Duration::from_secs(1)).await;
        let requests = server.lock().unwrap().requests.clone();
        let has_event = requests.iter().any(|(_, uri)| uri.contains("/events"));
        assert_eq!((store.len(), has_event), (0, !is_of_webhooks), "{requests:?}");
        task.abort();
    }
}
