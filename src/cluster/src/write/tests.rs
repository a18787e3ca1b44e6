//! The requests built from names and namespaces; the fake API server records them.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::{Arc, Mutex};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, PodTemplate, Secret};
use kube::client::Body;
use serde_json::json;
use tower::service_fn;

use super::*;

/// Strings that change the path into which they are inserted.
const HOSTILE: [&str; 14] = [
    "?",
    "x?y=",
    "?x",
    "../x",
    "..",
    ".",
    "a/b",
    "a#b",
    "#",
    "%2e",
    "a b",
    "",
    "x/pods?dryRun=",
    "A\n",
];

/// A client, and the requests sent through it.
fn recording_client() -> (kube::Client, Arc<Mutex<Vec<String>>>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&requests);
    let service = service_fn(move |request: http::Request<Body>| {
        record
            .lock()
            .unwrap()
            .push(format!("{} {}", request.method(), request.uri()));
        let answer = json!({ "kind": "Status", "code": 404, "reason": "NotFound", "message": "", "status": "Failure" });
        let answer = http::Response::builder()
            .status(404)
            .body(Body::from(answer.to_string().into_bytes()));
        std::future::ready(answer)
    });
    (kube::Client::new(service, "default"), requests)
}

/// Every kind of request about an object of that name.
async fn all_named_requests(api: &Api<Pod>, name: &str) -> Vec<Result<(), Error>> {
    let (patch, pod) = (json!({}), || Pod {
        metadata: kube::api::ObjectMeta {
            name: Some(name.to_owned()),
            ..Default::default()
        },
        ..Pod::default()
    });
    let dynamic = ApiResource::erase::<Pod>(&());
    let namespace = api.namespace().unwrap_or_default();
    let untyped = Api::namespaced_with(api.clone().into_client(), namespace, &dynamic);
    vec![
        get(api, name).await.map(drop),
        delete(api, name, "u").await,
        delete_if_unchanged(api, name, "u", Some("1")).await,
        patch_merge(api, name, &patch).await.map(drop),
        patch_status_merge(api, name, &patch).await.map(drop),
        patch_status_strategic(api, name, &patch).await.map(drop),
        patch_strategic(api, name, &patch).await.map(drop),
        dry_run_patch_strategic(api, name, &patch).await,
        patch_resize(api, name, &patch).await.map(drop),
        dry_run_patch_status(api, name, &patch).await,
        dry_run_patch_strategic(api, name, &patch).await,
        replace(api, &pod()).await.map(drop),
        get_metadata(&untyped, &dynamic, name).await.map(drop),
        get_partial::<_, IgnoredAny>(api, &(), name).await.map(drop),
        patch_metadata(&untyped, &dynamic, name, &patch).await,
    ]
}

/// The requests that need no name.
async fn all_unnamed_requests(api: &Api<Pod>) -> Vec<Result<(), Error>> {
    let dynamic = ApiResource::erase::<Pod>(&());
    let namespace = api.namespace().unwrap_or_default();
    let untyped: Api<DynamicObject> = Api::namespaced_with(api.clone().into_client(), namespace, &dynamic);
    vec![
        create(api, &Pod::default()).await.map(drop),
        create_raw(api, String::new()).await.map(drop),
        create_dry_run(api, String::new()).await.map(drop),
        list_metadata(&untyped, &dynamic, &ListParams::default())
            .await
            .map(drop),
        list_metadata(api, &(), &ListParams::default()).await.map(drop),
        list::<Pod>(api, &ListParams::default()).await.map(drop),
    ]
}

#[tokio::test]
async fn hostile_names_are_rejected_before_any_request() {
    let (client, requests) = recording_client();
    for text in HOSTILE {
        for result in all_named_requests(&Api::namespaced(client.clone(), "ns"), text).await {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidName { .. }), "{text:?}: {error}");
            assert!(!error.retryable() && !error.outcome_unknown());
        }
        let api = Api::namespaced(client.clone(), text);
        for result in all_named_requests(&api, "web")
            .await
            .into_iter()
            .chain(all_unnamed_requests(&api).await)
        {
            let error = result.unwrap_err();
            assert!(
                matches!(error, Error::InvalidNamespace { .. }),
                "{text:?}: {error}"
            );
        }
    }
    let long = "a".repeat(1 << 20);
    let error = get(&Api::<Node>::all(client.clone()), &long).await.unwrap_err();
    assert!(error.to_string().len() < 500, "{error}");
    assert_eq!(*requests.lock().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn valid_names_make_the_expected_requests() {
    let (client, requests) = recording_client();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "kube-system");
    let _ = get(&secrets, "registry.example-1").await;
    let _ = get(&Api::<Node>::all(client.clone()), "10.0.0.1").await;
    let _ = create_raw(&Api::<Lease>::namespaced(client.clone(), "a"), String::new()).await;
    let _ = dry_run_patch_status(&secrets, "a", &json!({})).await;
    let _ = create_dry_run(
        &Api::<PodTemplate>::namespaced(client.clone(), "a"),
        String::new(),
    )
    .await;
    assert_eq!(
        *requests.lock().unwrap(),
        [
            "GET /api/v1/namespaces/kube-system/secrets/registry.example-1",
            "GET /api/v1/nodes/10.0.0.1",
            "POST /apis/coordination.k8s.io/v1/namespaces/a/leases?",
            "PATCH /api/v1/namespaces/kube-system/secrets/a/status?&dryRun=All",
            "POST /api/v1/namespaces/a/podtemplates?&dryRun=All",
        ]
    );
}

/// A page that is too large for our memory is requested in parts, and managed fields that no type can hold hide no
/// object and are written back as they were.
#[tokio::test]
async fn metadata_pages_shrink_and_keep_managed_fields() {
    let fields = format!("{}1{}", r#"{"f:a":"#.repeat(9_000), "}".repeat(9_000));
    let managed = format!(
        r#"[{{"apiVersion":"v1","operation":"Apply","time":"9999-12-31T23:59:59Z","fieldsV1":{fields}}},7]"#
    );
    let object = format!(r#"{{"metadata":{{"name":"a","managedFields":{managed}}}}}"#);
    let (sent_limits, sent_patches) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (limits, patches) = (Arc::clone(&sent_limits), Arc::clone(&sent_patches));
    let service = service_fn(move |request: http::Request<Body>| {
        let (limits, patches, object) = (Arc::clone(&limits), Arc::clone(&patches), object.clone());
        async move {
            let answer = if request.method() == http::Method::PATCH {
                let text = request.into_body().collect_bytes().await.unwrap();
                patches.lock().unwrap().extend_from_slice(&text);
                object
            } else {
                let query = request.uri().query().unwrap_or_default();
                let limit = query.split('&').find_map(|pair| pair.strip_prefix("limit="));
                let limit: usize = limit.unwrap().parse().unwrap();
                limits.lock().unwrap().push(limit);
                let padding = " ".repeat(limit << 17);
                format!(r#"{{"apiVersion":"v1","kind":"L","metadata":{{}},{padding}"items":[{object}]}}"#)
            };
            http::Response::builder().body(Body::from(answer.into_bytes()))
        }
    });
    let kind = ApiResource::erase::<Pod>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(kube::Client::new(service, "a"), "a", &kind);
    let page = list_metadata(&api, &kind, &ListParams::default().limit(500))
        .await
        .unwrap();
    assert_eq!(*sent_limits.lock().unwrap(), [500, 125, 31]);
    let [object] = &page.items[..] else {
        panic!("one object")
    };
    let origins: Vec<_> = object
        .metadata
        .managed_fields
        .iter()
        .map(ManagedFields::origin)
        .collect();
    assert_eq!(
        origins,
        [("v1".to_owned(), "Apply".to_owned()), Default::default()]
    );
    patch_metadata(&api, &kind, "a", &object.metadata.managed_fields)
        .await
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&sent_patches.lock().unwrap()), managed);
}

/// A client whose API server answers every request with this object.
fn client_answering(object: &str) -> kube::Client {
    let object = object.to_owned();
    let service = service_fn(move |_: http::Request<Body>| {
        let answer = http::Response::builder().body(Body::from(object.clone().into_bytes()));
        std::future::ready(answer)
    });
    kube::Client::new(service, "default")
}

/// Any writer of an object can put values into its managed fields that our types cannot hold.
#[tokio::test]
async fn write_succeeds_with_unreadable_managed_fields() {
    let deep = format!("{}1{}", r#"{"f:a":"#.repeat(9_000), "}".repeat(9_000));
    for fields in [
        r#"[{"manager":"m","time":"9999-12-31T23:59:59Z"}]"#.to_owned(),
        format!(r#"[{{"fieldsV1":{deep}}},7,"text"]"#),
    ] {
        let lease = format!(
            r#"{{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","spec":{{"holderIdentity":"us"}},
                "metadata":{{"name":"a","namespace":"ns","resourceVersion":"7","managedFields":{fields}}}}}"#
        );
        let api: Api<Lease> = Api::namespaced(client_answering(&lease), "ns");
        let (none, object) = (
            json!({}),
            serde_json::from_str::<Lease>(r#"{"metadata":{"name":"a"}}"#).unwrap(),
        );
        let answers = [
            create(&api, &object).await,
            replace(&api, &object).await,
            patch_merge(&api, "a", &none).await,
            patch_status_merge(&api, "a", &none).await,
            patch_strategic(&api, "a", &none).await,
            patch_status_strategic(&api, "a", &none).await,
            patch_resize(&api, "a", &none).await,
        ];
        let read = |answer: Result<Stored<Lease>, Error>| answer.and_then(Stored::object).unwrap();
        let mut leases: Vec<Lease> = answers.into_iter().map(read).collect();
        leases.push(get(&api, "a").await.unwrap().unwrap());
        for lease in leases {
            assert_eq!(lease.spec.unwrap().holder_identity.as_deref(), Some("us"));
            assert_eq!(lease.metadata.resource_version.as_deref(), Some("7"));
        }
        for untyped in [
            create_raw(&api, String::new()).await,
            create_dry_run(&api, String::new()).await,
        ] {
            let untyped = untyped.unwrap();
            assert_eq!(
                (
                    &untyped["spec"]["holderIdentity"],
                    &untyped["metadata"]["managedFields"]
                ),
                (&json!("us"), &Value::Null)
            );
        }
        dry_run_patch_status(&api, "a", &none).await.unwrap();
        dry_run_patch_strategic(&api, "a", &none).await.unwrap();
    }
}

/// The API server executed the request, whatever it answers; only callers that need the object get the read error.
#[tokio::test]
async fn write_succeeds_with_an_unreadable_answer() {
    let api: Api<Secret> = Api::namespaced(
        client_answering(r#"{"metadata":{"name":"a","creationTimestamp":"9999-12-31T23:59:59Z"},"data":7}"#),
        "ns",
    );
    let count = |result: &str| {
        let labels = [
            ("kind", "Secret".to_owned()),
            ("verb", "patch_resize".to_owned()),
            ("result", result.to_owned()),
        ];
        metrics().api_writes.get_or_create(&labels).get()
    };
    let before = count("ok");
    let done = patch_resize(&api, "a", &json!({})).await.unwrap();
    assert_eq!((count("ok"), count("unreadable")), (before + 1, 0));
    let unreadable = done.object().unwrap_err();
    assert!(matches!(unreadable, Error::Unreadable { .. }), "{unreadable}");
    assert!(unreadable.outcome_unknown(), "{unreadable}: it is stored");
    assert_eq!(unreadable.category(), "unreadable");
    let unread = get(&api, "a").await.unwrap_err();
    assert!(
        unread
            .to_string()
            .starts_with("cannot parse the Secret that the API server answered get with: "),
        "{unread}"
    );
    let taken = create(
        &api,
        &Secret {
            metadata: kube::api::ObjectMeta::default(),
            ..Secret::default()
        },
    )
    .await;
    assert!(taken.is_ok());
}

#[tokio::test]
async fn token_is_read_and_shown_nowhere() {
    use k8s_openapi::api::authentication::v1::TokenRequestSpec;

    let token_request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: vec!["registry".to_owned()],
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let (client, requests) = recording_client();
    let missing = create_token(&Api::namespaced(client.clone(), "a"), "builder", &token_request).await;
    assert!(missing.err().unwrap().not_found());
    for hostile in HOSTILE {
        let refused = create_token(&Api::namespaced(client.clone(), "a"), hostile, &token_request).await;
        assert!(matches!(refused.err().unwrap(), Error::InvalidName { .. }));
    }
    assert_eq!(
        *requests.lock().unwrap(),
        ["POST /api/v1/namespaces/a/serviceaccounts/builder/token?"]
    );
    let answered = async |answer: serde_json::Value| {
        let api = Api::namespaced(client_answering(&answer.to_string()), "a");
        create_token(&api, "builder", &token_request).await
    };
    let granted = json!({ "spec": { "audiences": ["registry"], "expirationSeconds": 600 },
        "status": { "token": "hidden", "expirationTimestamp": "9999-12-31T23:59:59Z" } });
    let issued = answered(granted).await.ok().unwrap();
    assert_eq!(
        (issued.token.as_str(), issued.valid_for),
        ("hidden", Duration::from_secs(600))
    );
    for wrong in [
        json!({ "spec": { "expirationSeconds": "hidden" }, "status": { "token": "hidden" } }),
        json!({ "spec": { "expirationSeconds": -1 }, "status": { "token": "hidden" } }),
        json!({ "spec": { "expirationSeconds": 600 }, "status": { "token": "" } }),
        json!({ "token": "hidden" }),
    ] {
        let error = answered(wrong).await.err().unwrap();
        let expected =
            "cannot parse the ServiceAccount that the API server answered create_token with: it has no token";
        assert_eq!(error.to_string(), expected);
    }
}
