//! Forged reviews on the port that is open to everyone.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt, stream};
use http::Request;
use kruise_api::Kind;
use kube::client::ConfigExt;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use crate::full_cluster::{FullCluster, Objects, count_objects, exclusive_cluster, target};
use support::malformed_reviews::{
    NAMESPACE_DELETION_PATH, admission_reviews, conversion_reviews, deletion_review, full_object, mutations,
};
use support::waits;

/// Client configuration of an anonymous caller of the webhooks' port.
fn insecure_config(cluster: &FullCluster) -> Config {
    let mut config = Config::new(format!("https://127.0.0.1:{}", cluster.webhooks).parse().unwrap());
    config.accept_invalid_certs = true;
    config
}

/// Anonymous client of the webhooks' port.
fn unauthenticated_client(cluster: &FullCluster) -> Client {
    Client::try_from(insecure_config(cluster)).unwrap()
}

async fn post(client: &Client, path: &str, body: String) -> (u16, String) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(kube::client::Body::from(body.into_bytes())).unwrap();
    let answer = client.send(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = axum::body::to_bytes(axum::body::Body::new(answer.into_body()), usize::MAX)
        .await
        .unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn malformed_reviews_are_answered() {
    let cluster = exclusive_cluster().await;
    let client = unauthenticated_client(&cluster);
    let malformed = [
        json!(null),
        json!("x?y="),
        json!(-1),
        json!([{}]),
        json!({ "": 1 }),
    ];
    let mut requests = Vec::new();
    for kind in Kind::reviewed().map(|kind| kind.info().lowercase) {
        // The review of a create is among the mutations: the one without an old object.
        let [_, update] = admission_reviews(kind);
        // For an existing container, so that the review is fully evaluated.
        let mut update = update.to_string();
        for (shape, real) in [("ns", "default"), ("me", &target(0)), ("c", "main")] {
            update = update.replace(&json!(shape).to_string(), &json!(real).to_string());
        }
        let update = serde_json::from_str(&update).unwrap();
        for body in mutations(&update, &malformed) {
            for step in ["mutate", "validate"] {
                requests.push((format!("/{step}-apps-kruise-io-{kind}"), body.clone()));
            }
        }
        for review in conversion_reviews(kind) {
            requests.extend(
                mutations(&review, &malformed)
                    .into_iter()
                    .map(|body| ("/convert".to_owned(), body)),
            );
        }
    }
    // For an existing Namespace that has Pods.
    for body in mutations(&deletion_review("default"), &malformed) {
        requests.push((NAMESPACE_DELETION_PATH.to_owned(), body));
    }
    let answers = stream::iter(requests).map(|(path, body)| {
        let client = &client;
        async move {
            let (status, response) = post(client, &path, body.clone()).await;
            assert!([200, 400].contains(&status), "{status} {response} to {body}");
        }
    });
    answers.buffer_unordered(8).collect::<()>().await;
    cluster.assert_still_works("after-shapes").await;
}

#[tokio::test]
async fn forged_names_in_reviews_store_and_leak_nothing() {
    const SECRET: &str = "aHVudGVyMi1uZXZlci1sb2dnZWQ=";
    let cluster = exclusive_cluster().await;
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "token", "namespace": "kube-system" },
        "data": { "password": SECRET } });
    cluster.plane.apply(&secret.to_string()).unwrap();
    let client = unauthenticated_client(&cluster);
    let texts = [
        "default/podtemplates?x=",
        "default/podtemplates#",
        "kube-system/secrets?x=",
        "kube-system/secrets#",
        "../../secrets?x=",
        "?",
        "",
        "%2e%2e",
        "A\n",
    ];
    for kind in Kind::reviewed().map(|kind| kind.info().lowercase) {
        for text in texts {
            for (namespace, name) in [(text, "target-0"), ("default", text), ("kube-system", text)] {
                let mut object: Value = full_object(kind);
                object["metadata"]["name"] = json!(name);
                object["spec"]["podName"] = json!(name);
                object["spec"]["selector"] = json!({ "names": [name], "matchLabels": { "app": "web" } });
                object["spec"]["scaleStrategy"] = json!({ "podsToDelete": [name] });
                let review = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": { "uid": "u",
                    "kind": { "version": "v1beta1" }, "namespace": namespace, "name": name, "object": object } });
                for step in ["mutate", "validate"] {
                    let path = format!("/{step}-apps-kruise-io-{kind}");
                    let (status, response) = post(&client, &path, review.to_string()).await;
                    assert_eq!(status, 200, "{response}");
                    assert!(!response.contains(SECRET), "{response}");
                }
            }
        }
    }
    for text in texts.into_iter().chain(["kube-system"]) {
        let review = deletion_review(text).to_string();
        let (status, response) = post(&client, NAMESPACE_DELETION_PATH, review).await;
        assert_eq!(status, 200, "{response}");
        // None of these names is a Namespace with Pods.
        assert!(
            response.contains("\"allowed\":true") && !response.contains(SECRET),
            "{response}"
        );
    }
    let (_, response) = post(
        &client,
        NAMESPACE_DELETION_PATH,
        deletion_review("default").to_string(),
    )
    .await;
    assert!(response.contains("active pods"), "{response}");
    assert_eq!(count_objects(&cluster.admin().await, "PodTemplate").await, 0);
    assert!(!cluster.webhook_log().contains(SECRET), "a Secret is in the log");
    cluster.assert_still_works("after-names").await;
}

/// Connections that each of two addresses opens; all addresses together may have 768, one may have 600.
const CONNECTIONS_PER_ADDRESS: usize = 650;
/// Memory limit of the webhooks' container, in bytes.
const CONTAINER_MEMORY: u64 = 512 << 20;

/// Opens a connection from that address to the webhooks.
async fn connect_from(cluster: &FullCluster, from: Ipv4Addr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::new(from.into(), 0)).unwrap();
    let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), cluster.webhooks);
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn connection_flood_is_rejected_and_api_server_is_served() {
    let cluster = exclusive_cluster().await;
    let before = cluster.refused_connections();
    let mut flood = Vec::new();
    for last in [2, 3] {
        for _ in 0..CONNECTIONS_PER_ADDRESS {
            flood.push(connect_from(&cluster, Ipv4Addr::new(127, 0, 0, last)).await);
        }
    }
    let excess = CONNECTIONS_PER_ADDRESS - 600;
    let expected = before + u64::try_from(excess).unwrap();
    let _: () = waits::poll_until("the surplus is refused", &|| cluster.tail(), || async {
        (cluster.refused_connections() >= expected).then_some(())
    })
    .await;
    // Only the webhook validates that.
    let requests = Objects::of_kruise(&cluster.admin().await, "v1beta1", "ContainerRecreateRequest");
    let spec = json!({ "podName": "none", "containers": [{ "name": "main" }] });
    let error = requests
        .create(&json!({ "metadata": { "name": "flooded" }, "spec": spec }))
        .await;
    let error = error.unwrap_err();
    assert!(error.contains("there is no such Pod"), "{error}");
    let closed = &mut flood[CONNECTIONS_PER_ADDRESS - 1];
    let ended = tokio::time::timeout(waits::WAIT_TIMEOUT, closed.read(&mut [0])).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{ended:?}");
    cluster.assert_still_works("after-flood").await;
    let peak = cluster.webhook_memory();
    assert!(peak < CONTAINER_MEMORY, "{peak} bytes");
    drop(flood);
}

/// Connections of one address with large reviews. Their texts fit into its share of the memory, 64 MiB.
const HEAVY_CONNECTIONS: usize = 200;
/// Bytes of a list that is converted at once; a longer one waits for a slot in any case.
const LIST_BYTES: usize = 250 << 10;

/// Sends the same request again and again, until dropped.
async fn send_repeatedly(cluster: &FullCluster, from: Ipv4Addr, request: &[u8]) {
    let tls = TlsConnector::from(Arc::new(insecure_config(cluster).rustls_client_config().unwrap()));
    loop {
        let stream = connect_from(cluster, from).await;
        let stream = tls.connect("localhost".try_into().unwrap(), stream).await;
        // A client that sends too much may be disconnected at any time.
        let Ok(mut stream) = stream else { continue };
        while stream.write_all(request).await.is_ok() {
            let mut answer = [0; 64 << 10];
            let Ok(1..) = stream.read(&mut answer).await else {
                break;
            };
        }
    }
}

#[tokio::test]
async fn heavy_reviews_do_not_delay_other_addresses() {
    let cluster = exclusive_cluster().await;
    let [mut review, _] = conversion_reviews("cloneset");
    let object = review["request"]["objects"][0].take();
    let objects = LIST_BYTES / object.to_string().len();
    review["request"]["objects"] = vec![object; objects].into();
    let body = review.to_string();
    let head = format!(
        "POST /convert HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = [head, body].concat();
    let from = Ipv4Addr::new(127, 0, 0, 2);
    let crowd = (0..HEAVY_CONNECTIONS).map(|_| send_repeatedly(&cluster, from, request.as_bytes()));
    let api_server_calls = async {
        let before = cluster.lists_converted();
        let _: () = waits::poll_until("the crowd is served", &|| cluster.tail(), || async {
            (cluster.lists_converted() > before + HEAVY_CONNECTIONS as u64).then_some(())
        })
        .await;
        // The API server times out after 10 s, and its error names the webhook.
        let requests = Objects::of_kruise(&cluster.admin().await, "v1beta1", "ContainerRecreateRequest");
        for number in 0..10 {
            let (start, before) = (Instant::now(), cluster.lists_converted());
            let spec = json!({ "podName": "none", "containers": [{ "name": "main" }] });
            let request = json!({ "metadata": { "name": format!("crowded-{number}") }, "spec": spec });
            let error = requests.create(&request).await.unwrap_err();
            assert!(error.contains("there is no such Pod"), "{error}");
            let lists = cluster.lists_converted() - before;
            assert!(
                lists < HEAVY_CONNECTIONS as u64 / 4,
                "{lists} lists of the crowd came first"
            );
            println!(
                "answered after {:?}, {lists} lists of the crowd meanwhile",
                start.elapsed()
            );
        }
    };
    tokio::select! {
        _ = futures::future::join_all(crowd) => unreachable!("they ask for ever"),
        () = api_server_calls => {}
    }
    cluster.assert_still_works("after-crowd").await;
}
