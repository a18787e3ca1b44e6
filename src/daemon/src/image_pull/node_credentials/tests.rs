#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::service_accounts::tests::{reference, server};
use super::*;

const HEADER: &str = "#!/bin/sh\n";

/// A directory with plugins that are shell scripts, and their configuration.
struct Plugins {
    directory: tempfile::TempDir,
}

impl Plugins {
    fn new(scripts: &[(&str, &str)]) -> Self {
        Self::with_token(scripts, &Value::Null)
    }

    /// Plugins with these `tokenAttributes`.
    fn with_token(scripts: &[(&str, &str)], token: &Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut providers = Vec::new();
        for (name, script) in scripts {
            let path = directory.path().join(name);
            std::fs::write(&path, format!("{HEADER}{script}")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            providers.push(
                json!({ "name": name, "matchImages": ["*.test"], "defaultCacheDuration": "1h",
                "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "args": ["get"], "tokenAttributes": token,
                "env": [{ "name": "CALLS", "value": directory.path().join("calls") }] }),
            );
        }
        let config = json!({ "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
            "providers": providers });
        std::fs::write(directory.path().join("config.yaml"), config.to_string()).unwrap();
        Self { directory }
    }

    async fn load(&self) -> NodeCredentials {
        let config = self.directory.path().join("config.yaml");
        NodeCredentials::load(Some(&config), Some(self.directory.path())).await
    }

    /// The requests of all calls, one a line.
    fn calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

/// A script that notes its request and returns the user `name` for all images of the registry.
fn answer(scope: &str, user: &str) -> String {
    let response = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
        "cacheKeyType": scope, "auth": { "*.test": { "username": user, "password": "p" } } });
    format!("request=$(cat)\necho \"$1 $request\" >> \"$CALLS\"\necho '{response}'\n")
}

/// Waits until no process of the group runs; zombies do not.
async fn wait_group_ended(group: &str) {
    let runs = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // After the name in parentheses: state, parent, group.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let state = fields.next().unwrap_or("Z");
        fields.nth(1) == Some(group) && state != "Z"
    };
    let ended = async {
        while std::fs::read_dir("/proc").unwrap().flatten().any(runs) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), ended).await;
    assert!(ended.is_ok(), "process group {group} still runs");
}

fn users(found: &NodeLookup) -> Vec<&str> {
    found
        .credentials
        .iter()
        .map(|found| found.username.as_str())
        .collect()
}

#[tokio::test]
async fn plugins_are_called_once_for_what_they_keep() {
    let plugins = Plugins::new(&[("one", &answer("Registry", "u")), ("two", &answer("Image", "v"))]);
    let node = plugins.load().await;
    for repository in ["r.test/a", "r.test/b", "r.test/a", "s.test/a"] {
        let found = node.lookup(repository, true).await;
        assert_eq!(
            (users(&found), found.problems.as_slice()),
            (vec!["u", "v"], &[][..])
        );
    }
    assert_eq!(node.lookup("other.example/a", true).await, NodeLookup::default());
    let request = |repository: &str| {
        let request = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderRequest",
            "image": repository });
        format!("get {request}")
    };
    let mut calls = plugins.calls();
    calls.sort();
    let mut expected = ["r.test/a", "s.test/a", "r.test/a", "r.test/b", "s.test/a"].map(request);
    expected.sort();
    assert_eq!(calls, expected);
}

#[tokio::test]
async fn pulls_at_once_share_a_call() {
    let plugins = Plugins::new(&[("one", &answer("Registry", "u"))]);
    let node = plugins.load().await;
    let all = futures::future::join_all((0..20).map(|_| node.lookup("r.test/a", true))).await;
    assert!(all.iter().all(|found| users(found) == ["u"]));
    assert_eq!(plugins.calls().len(), 1);
}

#[tokio::test]
async fn failing_plugins_are_named_and_stop_no_other() {
    let plugins = Plugins::new(&[
        ("fails", "head -c 100000 /dev/zero >&2 && exit 3"),
        ("floods", "echo $$ >> \"$CALLS\"; yes hidden"),
        ("lies", "echo '{\"auth\":\"hidden\"}'"),
        ("good", &answer("Global", "u")),
    ]);
    let node = plugins.load().await;
    let found = node.lookup("r.test/a", true).await;
    assert_eq!(users(&found), ["u"]);
    let expected = [
        "credential provider \"fails\": it ended with exit status: 3",
        "credential provider \"floods\": its output has more than 1048576 bytes",
        "credential provider \"lies\": its output is not a CredentialProviderResponse",
    ];
    assert_eq!(found.problems, expected);
    let calls = plugins.calls();
    let group = calls.iter().find(|call| call.parse::<i32>().is_ok());
    wait_group_ended(group.unwrap()).await;
}

#[tokio::test]
async fn cancelled_call_kills_the_plugin_with_its_children() {
    let plugins = Plugins::new(&[("hangs", "sleep 1000 & echo $$ >> \"$CALLS\"; wait")]);
    let node = plugins.load().await;
    let started = async {
        while plugins.calls().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        found = node.lookup("r.test/a", true) => unreachable!("{found:?}"),
        () = started => {}
    }
    wait_group_ended(&plugins.calls()[0]).await;
}

#[tokio::test]
async fn configuration_that_cannot_be_used_is_reported_with_each_pull() {
    let plugins = Plugins::new(&[]);
    let found = plugins.load().await.lookup("r.test/a", true).await;
    let [problem] = &found.problems[..] else {
        unreachable!("{found:?}")
    };
    assert!(
        problem.starts_with("credential provider plugins are not used: "),
        "{problem}"
    );
    assert!(
        problem.ends_with("config.yaml: it has 0 providers; expected 1 to 100"),
        "{problem}"
    );
    let none = NodeCredentials::load(Some(Path::new("/nonexistent")), None).await;
    assert_eq!(none.lookup("r.test/a", true).await, NodeLookup::default());
    let directory = NodeCredentials::load(Some(Path::new("/")), None).await;
    assert_eq!(
        directory.problem.unwrap(),
        "credential provider plugins are not used: /: it is not a file"
    );
}

#[tokio::test]
async fn first_docker_configuration_counts() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let paths = [
        (path("missing"), false),
        (path("config.json"), false),
        (path(".dockercfg"), true),
    ];
    let found = async || {
        docker_config(&paths)
            .await
            .map(|keyring| keyring.lookup("r.test/a"))
    };
    assert_eq!(found().await, Ok(Vec::new()));
    let login = |user: &str| json!({ "r.test": { "username": user, "password": "p" } });
    std::fs::write(path(".dockercfg"), login("older").to_string()).unwrap();
    assert_eq!(found().await.unwrap()[0].username, "older");
    std::fs::write(path("config.json"), json!({ "auths": login("json") }).to_string()).unwrap();
    assert_eq!(found().await.unwrap()[0].username, "json");
    std::fs::write(path("config.json"), "{").unwrap();
    let why = found().await.unwrap_err();
    assert!(
        why.starts_with("the node's /") && why.contains("cannot be used"),
        "{why}"
    );
}

/// `tokenAttributes` of kubelet's configuration.
fn token(cache_type: &str, is_required: bool) -> Value {
    json!({ "serviceAccountTokenAudience": "registry", "cacheType": cache_type, "requireServiceAccount": is_required,
        "optionalServiceAccountAnnotationKeys": ["role"] })
}

fn account_users(found: &AccountLookup) -> Vec<(&str, &str)> {
    let users = found.credentials.iter().flat_map(|(namespace, credentials)| {
        let users = credentials.iter().map(|found| found.username.as_str());
        users.map(move |user| (namespace.as_str(), user))
    });
    users.collect()
}

#[tokio::test]
async fn plugin_gets_a_token_of_each_service_account() {
    let answer = answer("Registry", "u");
    let plugins = Plugins::with_token(&[("one", &answer)], &token("ServiceAccount", true));
    let node = plugins.load().await;
    let (accounts, _) = server("r");
    let references = [reference("ns", "a"), reference("other", "b")];
    for repository in ["r.test/a", "r.test/b"] {
        let found = node.lookup_accounts(repository, &references, &accounts).await;
        assert_eq!(account_users(&found), [("ns", "u"), ("other", "u")]);
        assert_eq!((found.problems.len(), found.unread_retry), (0, None));
    }
    let request = |token: &str| {
        let request = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderRequest",
            "image": "r.test/a", "serviceAccountToken": token, "serviceAccountAnnotations": { "role": "r" } });
        format!("get {request}")
    };
    // Each is read, and then has a token requested.
    assert_eq!(plugins.calls(), [request("TOKEN-a-2"), request("TOKEN-b-4")]);
    let found = node
        .lookup_accounts("other.example/a", &references, &accounts)
        .await;
    assert_eq!(found, AccountLookup::default());
}

#[tokio::test]
async fn credentials_are_kept_for_the_token_or_its_account() {
    for (cache_type, calls) in [("ServiceAccount", 1), ("Token", 2)] {
        let answer = answer("Registry", "u");
        let plugins = Plugins::with_token(&[("one", &answer)], &token(cache_type, true));
        let node = plugins.load().await;
        // Two sources of tokens: the second has another one for the same account.
        for number in 0..2 {
            let (accounts, _) = server("r");
            for _ in 0..number {
                accounts.read(&reference("ns", "a")).await.unwrap();
            }
            for _ in 0..2 {
                let found = node
                    .lookup_accounts("r.test/a", &[reference("ns", "a")], &accounts)
                    .await;
                assert_eq!(account_users(&found), [("ns", "u")]);
            }
        }
        assert_eq!(plugins.calls().len(), calls, "{cache_type}");
        // Another value of an annotation that the plugin gets.
        let (accounts, _) = server("changed");
        let references = [reference("ns", "a")];
        node.lookup_accounts("r.test/a", &references, &accounts).await;
        assert_eq!(plugins.calls().len(), calls + 1, "{cache_type}");
    }
}

#[tokio::test]
async fn service_accounts_that_cannot_be_used_are_named_without_a_token() {
    let echo = "request=$(cat)\necho \"$request\" >&2\nexit 3\n";
    let mut required = token("Token", true);
    required["requiredServiceAccountAnnotationKeys"] = json!(["tenant"]);
    let (accounts, _) = server("r");
    let node = Plugins::with_token(&[("one", echo)], &token("Token", true));
    let references = ["missing", "forbidden", "a"].map(|name| reference("ns", name));
    let found = node
        .load()
        .await
        .lookup_accounts("r.test/a", &references, &accounts)
        .await;
    let expected = [
        "service account ns/missing cannot be used: it does not exist",
        "credential provider \"one\", service account ns/forbidden: no token: API server refused: no (HTTP 403)",
        "credential provider \"one\", service account ns/a: it ended with exit status: 3",
    ];
    assert_eq!(found.problems, expected);
    assert_eq!(found.unread_retry, Some(AttemptRetry::Uncounted));
    let node = Plugins::with_token(&[("one", echo)], &required);
    let found = node
        .load()
        .await
        .lookup_accounts("r.test/a", &references[2..], &accounts)
        .await;
    assert_eq!(
        found.problems,
        ["credential provider \"one\", service account ns/a: it has no annotation \"tenant\""]
    );
}

#[test]
fn owners_of_several_namespaces_read_no_names_of_service_accounts() {
    let shown = |problems: &[&str], namespaces: &[&str]| {
        let owners = namespaces.iter().map(|namespace| ObjectReference {
            namespace: Some((*namespace).to_owned()),
            ..ObjectReference::default()
        });
        let problems = problems.iter().map(|problem| (*problem).to_owned());
        shown_account_problems(problems.collect(), "r.test/a", &owners.collect::<Vec<_>>())
    };
    let problems = [
        "service account a/robot cannot be used: it does not exist",
        "credential provider \"one\", service account a/ci: it has no annotation \"tenant\"",
    ];
    assert_eq!(shown(&problems, &["a", "a"]), problems);
    assert_eq!(shown(&problems, &["a", "b"]), [HIDDEN_ACCOUNT_PROBLEMS]);
    assert!(shown(&[], &["a", "b"]).is_empty());
}

#[tokio::test]
async fn plugin_is_called_without_a_service_account_only_if_it_may() {
    for (is_required, without_account, called) in
        [(true, true, false), (false, true, true), (false, false, false)]
    {
        let answer = answer("Image", "u");
        let plugins = Plugins::with_token(&[("one", &answer)], &token("Token", is_required));
        let found = plugins.load().await.lookup("r.test/a", without_account).await;
        assert_eq!(users(&found).len(), usize::from(called));
        let why = "credential provider \"one\" requires a service account, and a job of this image has no serviceAccountName";
        let problems: &[&str] = if is_required { &[why] } else { &[] };
        assert_eq!(found.problems, problems);
    }
}
