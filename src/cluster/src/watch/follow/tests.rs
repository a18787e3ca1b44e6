//! Mirrors on an API server that fails, is slow, or says nothing, in played time.
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
use crate::{Key, Mirror, watch::mirror};
use kruise_ops::Watches;

/// What becomes of a request.
#[derive(Clone, Debug)]
enum Answer {
    /// This code and object.
    Object(u16, Value),
    /// A list of ConfigMaps of these names, with a token for the next page if there is one.
    List(&'static [&'static str], Option<&'static str>),
    /// A watch with these events, which then ends.
    Ends(Vec<Value>),
    /// A watch with these events, which then says nothing.
    Silent(Vec<Value>),
    /// The connection is accepted, and nothing comes.
    Nothing,
}

use Answer::{Ends, List, Nothing, Object, Silent};

/// The answers in turn, the last of them for ever, and the requests with their times since the start.
struct Server {
    answers: Vec<Answer>,
    asked: Vec<(Duration, String)>,
    start: Instant,
}

impl Server {
    fn ask(&mut self, uri: &http::Uri) -> Answer {
        let nth = self.asked.len().min(self.answers.len() - 1);
        self.asked.push((self.start.elapsed(), uri.to_string()));
        self.answers[nth].clone()
    }
}

fn config_map(name: &str, version: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "ns", "resourceVersion": version } })
}

fn event(sort: &str, object: &Value) -> Value {
    json!({ "type": sort, "object": object })
}

fn refused(code: u16, message: &str, retry_after: u32) -> Answer {
    Object(
        code,
        json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": "Reason",
            "message": message, "details": { "retryAfterSeconds": retry_after } }),
    )
}

fn forgotten() -> Value {
    event(
        "ERROR",
        &json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version" }),
    )
}

/// The body of an answer.
type Sent = UnsyncBoxBody<Bytes, Infallible>;

fn whole(object: &Value) -> Sent {
    Full::from(object.to_string()).boxed_unsync()
}

fn watch_of(events: &[Value], ends: bool) -> Sent {
    let lines: Vec<_> = events
        .iter()
        .map(|event| {
            // As the API server writes it: the type first.
            let line = format!("{{\"type\":{},\"object\":{}}}\n", event["type"], event["object"]);
            Ok::<_, Infallible>(Frame::data(Bytes::from(line)))
        })
        .collect();
    let lines = stream::iter(lines);
    if ends {
        StreamBody::new(lines).boxed_unsync()
    } else {
        StreamBody::new(lines.chain(stream::pending())).boxed_unsync()
    }
}

fn client(server: &Arc<Mutex<Server>>) -> kube::Client {
    let server = Arc::clone(server);
    let service = service_fn(move |request: Request<Body>| {
        let answer = server.lock().unwrap().ask(request.uri());
        async move {
            let (code, body) = match answer {
                Object(code, object) => (code, whole(&object)),
                List(names, more) => {
                    let items: Vec<Value> = names.iter().map(|name| config_map(name, "5")).collect();
                    let list = json!({ "apiVersion": "v1", "kind": "ConfigMapList", "items": items,
                        "metadata": { "resourceVersion": "5", "continue": more } });
                    (200, whole(&list))
                }
                Ends(events) => (200, watch_of(&events, true)),
                Silent(events) => (200, watch_of(&events, false)),
                Nothing => return std::future::pending().await,
            };
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    });
    kube::Client::new(service, "default")
}

/// A mirror that is kept, what is known of its watch, and what was asked.
struct World {
    mirror: Mirror<String>,
    watches: Watches,
    server: Arc<Mutex<Server>>,
    task: tokio::task::JoinHandle<()>,
}

impl World {
    fn new(answers: Vec<Answer>) -> Self {
        let server = Arc::new(Mutex::new(Server {
            answers,
            asked: Vec::new(),
            start: Instant::now(),
        }));
        let watches = Watches::default();
        let watch = watches.begin("ConfigMap");
        let api = Api::<ConfigMap>::namespaced(client(&server), "ns");
        let (mirror, task) = mirror(api, ListParams::default(), None, Some(watch), |c: ConfigMap| {
            c.metadata.resource_version
        });
        Self {
            mirror,
            watches,
            server,
            task: tokio::spawn(task),
        }
    }

    /// Lets that much time pass, and everything in it happen.
    async fn pass(&self, seconds: u64) {
        sleep(Duration::from_secs(seconds)).await;
        assert!(!self.task.is_finished());
    }

    /// The requests so far with their times in whole seconds: `list` or `watch FROM`.
    fn asked(&self) -> Vec<(u64, String)> {
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
        server.asked.iter().map(read).collect()
    }

    fn what(&self) -> Vec<String> {
        self.asked().into_iter().map(|(_, what)| what).collect()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .mirror
            .entries()
            .into_iter()
            .map(|(key, _)| key.name)
            .collect();
        names.sort();
        names
    }

    fn problem(&self) -> String {
        self.watches.check().unwrap().unwrap_err()
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_is_repeated_ever_more_rarely() {
    let world = World::new(vec![refused(403, "configmaps is forbidden", 0)]);
    world.pass(600).await;
    let asked = world.asked();
    // Nine while the pause doubles from 0.2 s to 30 s, and one each 15 s to 45 s then.
    assert!(
        (18..=48).contains(&asked.len()),
        "{} lists: {asked:?}",
        asked.len()
    );
    assert!(
        world.problem().contains("ConfigMap is not listed yet"),
        "{}",
        world.problem()
    );
    assert!(
        world.problem().contains("configmaps is forbidden"),
        "{}",
        world.problem()
    );
}

#[tokio::test(start_paused = true)]
async fn a_page_that_fails_is_asked_for_again_ever_more_rarely_without_the_pages_before_it() {
    let world = World::new(vec![List(&["a"], Some("more")), refused(500, "broken", 0)]);
    world.pass(600).await;
    let asked = world.what();
    assert!(
        (18..=49).contains(&asked.len()),
        "{} requests: {asked:?}",
        asked.len()
    );
    assert_eq!(asked[0], "list");
    assert!(asked[1..].iter().all(|what| what == "list more"), "{asked:?}");
    assert!(!world.mirror.is_synced());

    // A large cluster, whose API server turns every second request away.
    let mut answers = Vec::new();
    for _ in 0..300 {
        answers.extend([List(&["a"], Some("more")), refused(429, "later", 1)]);
    }
    answers.extend([List(&["b"], None), Silent(vec![])]);
    let world = World::new(answers);
    world.pass(600).await;
    assert_eq!(world.names(), ["a", "b"]);
    let asked = world.what();
    assert_eq!(asked.iter().filter(|what| *what == "list").count(), 1);
}

/// Readiness and metric tell of a mirror that gets no further, whatever is answered in between.
#[tokio::test(start_paused = true)]
async fn a_mirror_is_stale_where_the_answers_bring_it_no_further() {
    let mut later_page = vec![
        List(&["a"], None),
        Ends(vec![forgotten()]),
        List(&["a"], Some("more")),
    ];
    later_page.push(refused(500, "broken", 0));
    for answers in [later_page, vec![List(&["a"], None), Ends(vec![])]] {
        let world = World::new(answers);
        world.pass(200).await;
        assert_eq!(world.watches.check(), Some(Ok("ConfigMap".to_owned())));
        world.pass(100).await;
        let problem = world.problem();
        assert!(
            problem.starts_with("ConfigMap is stale: nothing heard for "),
            "{problem}"
        );
    }
}

/// Twenty objects of 1.5 MB are no more than a page of eight at a time.
#[tokio::test(start_paused = true)]
async fn large_objects_are_read_a_few_at_a_time() {
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
    let world = World::new(vec![
        page(20, None),
        page(20, None),
        page(20, None),
        page(5, Some("more")),
        page(2, None),
        Silent(vec![]),
    ]);
    world.pass(10).await;
    assert_eq!(world.names(), ["o0", "o1", "o2", "o3", "o4"]);
    let limits: Vec<_> = world
        .server
        .lock()
        .unwrap()
        .asked
        .iter()
        .filter_map(|(_, uri)| Some(uri.split_once("limit=")?.1.split('&').next()?.to_owned()))
        .collect();
    assert_eq!(limits, ["500", "125", "31", "7", "7"]);
}

#[tokio::test(start_paused = true)]
async fn the_pause_that_the_api_server_asks_for_is_made() {
    let world = World::new(vec![
        refused(429, "later", 40),
        List(&["a"], None),
        Silent(vec![]),
    ]);
    world.pass(39).await;
    assert_eq!(world.what(), ["list"]);
    world.pass(22).await;
    assert_eq!(world.what(), ["list", "list", "watch 5"]);
    assert_eq!(world.names(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_never_answered_is_given_up_after_a_minute() {
    let world = World::new(vec![
        Nothing,
        List(&["a"], Some("more")),
        Nothing,
        List(&["b"], None),
        Nothing,
    ]);
    world.pass(59).await;
    assert_eq!(world.what(), ["list"]);
    world.pass(3).await;
    assert_eq!(world.what(), ["list", "list", "list more"]);
    assert!(
        world.problem().starts_with("ConfigMap is not listed yet"),
        "{}",
        world.problem()
    );
    world.pass(61).await;
    assert_eq!(
        world.what(),
        ["list", "list", "list more", "list more", "watch 5"]
    );
    assert_eq!(world.names(), ["a", "b"]);
    assert_eq!(world.watches.check(), Some(Ok("ConfigMap".to_owned())));

    // The start of the watch is not answered either, again and again.
    world.pass(250).await;
    let problem = world.problem();
    assert!(
        problem.starts_with("ConfigMap is stale: nothing heard for 25")
            && problem.contains("did not answer watch ConfigMap within 60s"),
        "{problem}"
    );
    world.server.lock().unwrap().answers.push(Silent(vec![]));
    let patience = 100;
    world.pass(patience).await;
    assert_eq!(
        world.watches.check(),
        Some(Ok("ConfigMap".to_owned())),
        "readiness comes back"
    );
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_falls_silent_is_started_again_from_where_it_was() {
    let bookmark = event("BOOKMARK", &config_map("", "7"));
    let changes = vec![event("ADDED", &config_map("b", "6")), bookmark];
    let world = World::new(vec![List(&["a"], None), Silent(changes), Silent(vec![])]);
    world.pass(149).await;
    assert_eq!(world.what(), ["list", "watch 5"]);
    assert_eq!(world.names(), ["a", "b"]);
    world.pass(2).await;
    assert_eq!(world.what(), ["list", "watch 5", "watch 7"]);
    world.pass(610).await;
    assert_eq!(world.what()[3..], ["watch 7"; 4]);
    assert_eq!(
        world.watches.check(),
        Some(Ok("ConfigMap".to_owned())),
        "silent is not stale"
    );
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_repeated_ever_more_rarely() {
    let world = World::new(vec![List(&["a"], None), Ends(vec![])]);
    world.pass(600).await;
    let asked = world.asked().len();
    assert!((19..=49).contains(&asked), "{asked} requests");
}

#[tokio::test(start_paused = true)]
async fn what_the_api_server_has_forgotten_is_listed_again_soon_but_not_without_end() {
    let mut answers = vec![List(&["a"], None)];
    // Away for a while: the pause is long by then.
    answers.extend(vec![refused(503, "away", 0); 12]);
    answers.extend([Ends(vec![forgotten()]), List(&["b"], None)]);
    answers.extend([Silent(vec![event("DELETED", &config_map("b", "9"))])]);
    let world = World::new(answers);
    world.pass(400).await;
    let asked = world.asked();
    let (gone, listed) = (&asked[13], &asked[14]);
    assert_eq!(listed.1, "list");
    assert!(listed.0 - gone.0 <= 1, "{asked:?}");
    assert!(world.names().is_empty(), "{:?}", world.names());
    assert_eq!(world.what()[15..17], ["watch 5", "watch 9"]);

    // An API server that forgets at once, each time.
    let mut answers = Vec::new();
    for _ in 0..100 {
        answers.extend([List(&["a"], None), Ends(vec![forgotten()])]);
    }
    let world = World::new(answers);
    world.pass(600).await;
    let asked = world.asked().len();
    assert!((36..=98).contains(&asked), "{asked} requests");
}

#[tokio::test(start_paused = true)]
async fn changes_arrive_in_order_and_progress_resets_the_pause() {
    let broken = "this is no object";
    let changes = vec![
        event("ADDED", &config_map("b", "6")),
        event("MODIFIED", &config_map("a", "7")),
        event("DELETED", &config_map("b", "8")),
        json!(broken),
    ];
    let mut answers = vec![refused(500, "broken", 0); 9];
    answers.extend([List(&["a"], None), Ends(changes), Silent(vec![])]);
    let world = World::new(answers);
    world.pass(300).await;
    assert_eq!(world.names(), ["a"]);
    let kept = world.mirror.get(&Key::namespaced("ns", "a")).unwrap();
    assert_eq!(*kept, "7");
    let asked = world.asked();
    let again = asked.iter().position(|(_, what)| what == "watch 8").unwrap();
    assert!(asked[again].0 - asked[again - 1].0 <= 1, "{asked:?}");
}

#[test]
fn pauses_double_to_their_maximum_and_are_spread() {
    for nth in 0..40 {
        let doubled = RETRY.pause(nth);
        let pauses: Vec<Duration> = (0..50).map(|_| pause(nth, None, &RandomState::new())).collect();
        let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        assert!(
            *least >= doubled / 2 && *most <= doubled * 3 / 2,
            "{nth}: {least:?} to {most:?}"
        );
        assert!(*most - *least > doubled / 10, "{nth}: not spread");
        let asked = pause(nth, Some(Duration::MAX), &RandomState::new());
        assert!(
            (LONGEST_ASKED..=LONGEST_ASKED * 3 / 2).contains(&asked),
            "{asked:?}"
        );
    }
}
