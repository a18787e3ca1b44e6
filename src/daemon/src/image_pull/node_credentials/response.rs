//! Requests to credential provider plugins, and their responses.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{Provider, TokenCacheType};
use super::service_accounts::PluginAccount;
use crate::image_pull::plan::keyring::{Credentials, Keyring};
use kruise_api::json::set;
use kruise_ops::flag_values::duration;

/// Maximum number of registries in a response.
const MAX_AUTHS: usize = 1000;
/// Longest time for which credentials are kept. Kubelet has no limit; a plugin that says 1000 years is wrong.
const MAX_CACHE: Duration = Duration::from_secs(7 * 24 * 3600);

/// For which images credentials are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheScope {
    /// For the same repository.
    Image,
    /// For the same registry.
    Registry,
    /// For all images of the plugin.
    Global,
}

/// Credentials of a plugin.
#[derive(Clone, Debug)]
pub struct PluginCredentials {
    /// The credentials by registry and path.
    pub keyring: Keyring,
    /// For which images they are kept.
    pub scope: CacheScope,
    /// How long.
    pub keep: Duration,
}

/// The request for a repository, in the name of a service account if there is one.
pub fn request(provider: &Provider, repository: &str, account: Option<&PluginAccount>) -> String {
    let mut request = json!({ "apiVersion": provider.api_version, "kind": "CredentialProviderRequest", "image": repository });
    if let Some(account) = account {
        set(&mut request, &["serviceAccountToken"], json!(&*account.token));
        if !account.annotations.is_empty() {
            set(
                &mut request,
                &["serviceAccountAnnotations"],
                json!(account.annotations),
            );
        }
    }
    request.to_string()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    api_version: String,
    kind: String,
    #[serde(default)]
    cache_key_type: Option<String>,
    #[serde(default)]
    cache_duration: Option<Value>,
    #[serde(default)]
    auth: Option<BTreeMap<String, AuthEntry>>,
}

#[derive(Deserialize)]
struct AuthEntry {
    #[serde(default)]
    username: Option<String>,
    #[serde(default)]
    password: Option<String>,
}

/// Parses a response. An error contains nothing of it, because it has secrets.
///
/// # Errors
/// When it is not a response of this version, or has an unknown value.
pub fn parse(
    provider: &Provider,
    account: Option<&PluginAccount>,
    output: &[u8],
) -> Result<PluginCredentials, &'static str> {
    let response: Response =
        serde_json::from_slice(output).map_err(|_| "its output is not a CredentialProviderResponse")?;
    if response.api_version != provider.api_version || response.kind != "CredentialProviderResponse" {
        return Err("its output is not a CredentialProviderResponse of the configured apiVersion");
    }
    let scope = match response.cache_key_type.as_deref() {
        Some("Image") => CacheScope::Image,
        Some("Registry") => CacheScope::Registry,
        Some("Global") => CacheScope::Global,
        _ => return Err("its cacheKeyType is not Image, Registry or Global"),
    };
    let keep = match response.cache_duration {
        None | Some(Value::Null) => provider.default_cache,
        // As in kubelet, credentials with a negative duration are used once.
        Some(Value::String(text)) if text.strip_prefix('-').is_some_and(|text| duration(text).is_ok()) => {
            Duration::ZERO
        }
        Some(Value::String(text)) => duration(&text).map_err(|_| "its cacheDuration is not a duration")?,
        Some(_) => return Err("its cacheDuration is not a duration"),
    };
    let auths = response.auth.unwrap_or_default();
    if auths.len() > MAX_AUTHS {
        return Err("its auth has more than 1000 entries");
    }
    let is_token =
        |entry: &AuthEntry| account.is_some_and(|account| entry.password.as_deref() == Some(&*account.token));
    let cache_type = provider.service_account.as_ref().map(|token| token.cache_type);
    // It would be used by others that have no such token, and after its end.
    if cache_type != Some(TokenCacheType::Token) && auths.values().any(is_token) {
        return Err("it returned the token as a password, which its cacheType ServiceAccount does not allow");
    }
    let mut keyring = Keyring::default();
    for (registry, entry) in auths {
        let credentials = Credentials {
            username: entry.username.unwrap_or_default(),
            password: entry.password.unwrap_or_default(),
            ..Credentials::default()
        };
        keyring.add(&registry, credentials);
    }
    Ok(PluginCredentials {
        keyring,
        scope,
        keep: keep.min(MAX_CACHE),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::config;
    use super::*;

    fn provider() -> Provider {
        let text = "{apiVersion: kubelet.config.k8s.io/v1, kind: CredentialProviderConfig, providers: [{name: p, \
                    matchImages: [r.test], defaultCacheDuration: 1m, apiVersion: credentialprovider.kubelet.k8s.io/v1}]}";
        config::parse(text).unwrap().remove(0)
    }

    fn response(change: &Value) -> Value {
        let mut response = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderResponse", "cacheKeyType": "Registry", "cacheDuration": "5m0s",
            "auth": { "r.test": { "username": "u", "password": "p" }, "r.test/team": { "username": "t", "password": "q" } } });
        json_patch::merge(&mut response, change);
        response
    }

    fn parsed(change: &Value) -> Result<PluginCredentials, &'static str> {
        parse(&provider(), None, response(change).to_string().as_bytes())
    }

    #[test]
    fn request_names_version_and_repository() {
        let request: Value = serde_json::from_str(&request(&provider(), "r.test/team/app", None)).unwrap();
        assert_eq!(
            request,
            json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderRequest", "image": "r.test/team/app" })
        );
    }

    #[test]
    fn credentials_are_matched_and_kept_as_the_response_says() {
        let all = parsed(&json!({})).unwrap();
        assert_eq!(
            (all.scope, all.keep),
            (CacheScope::Registry, Duration::from_secs(300))
        );
        let users = |repository: &str| -> Vec<String> {
            all.keyring
                .lookup(repository)
                .into_iter()
                .map(|found| found.username)
                .collect()
        };
        assert_eq!(users("r.test/team/app"), ["t", "u"]);
        assert_eq!(users("r.test/other"), ["u"]);
        assert_eq!(users("other.test/team"), [] as [String; 0]);
        let kept = |duration: Value| parsed(&json!({ "cacheDuration": duration })).map(|all| all.keep);
        assert_eq!(kept(Value::Null), Ok(Duration::from_secs(60)));
        assert_eq!(kept(json!("0s")), Ok(Duration::ZERO));
        assert_eq!(kept(json!("-1h")), Ok(Duration::ZERO));
        assert_eq!(kept(json!("100000h")), Ok(MAX_CACHE));
        assert!(
            parsed(&json!({ "auth": null }))
                .unwrap()
                .keyring
                .lookup("r.test/a")
                .is_empty()
        );
    }

    #[test]
    fn wrong_responses_are_refused_without_their_content() {
        for change in [
            json!({ "kind": "Pod" }),
            json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1" }),
            json!({ "cacheKeyType": "image" }),
            json!({ "cacheKeyType": null }),
            json!({ "cacheDuration": "soon" }),
            json!({ "cacheDuration": 7 }),
            json!({ "auth": { "r.test": { "username": ["u"], "password": "hidden" } } }),
            json!({ "auth": "hidden" }),
        ] {
            let why = parsed(&change).unwrap_err();
            assert!(!why.contains("hidden"), "{why}");
        }
        assert!(parse(&provider(), None, b"").is_err());
    }

    fn account() -> PluginAccount {
        let annotations = [("role".to_owned(), "r".to_owned())].into();
        PluginAccount::new(
            ["ns", "a", "uid"],
            annotations,
            "jwt-1".into(),
            TokenCacheType::Token,
        )
    }

    #[test]
    fn request_has_token_and_annotations_of_the_service_account() {
        let sent = |account: &PluginAccount| -> Value {
            serde_json::from_str(&request(&provider(), "r.test/app", Some(account))).unwrap()
        };
        let mut expected = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderRequest", "image": "r.test/app", "serviceAccountToken": "jwt-1",
            "serviceAccountAnnotations": { "role": "r" } });
        assert_eq!(sent(&account()), expected);
        let mut without = account();
        without.annotations.clear();
        expected
            .as_object_mut()
            .unwrap()
            .remove("serviceAccountAnnotations");
        assert_eq!(sent(&without), expected);
    }

    #[test]
    fn token_is_a_password_only_if_it_is_kept_for_the_token() {
        let text = "{apiVersion: kubelet.config.k8s.io/v1, kind: CredentialProviderConfig, providers: [{name: p, \
                    matchImages: [r.test], defaultCacheDuration: 1m, apiVersion: credentialprovider.kubelet.k8s.io/v1, \
                    tokenAttributes: {serviceAccountTokenAudience: a, cacheType: TYPE, requireServiceAccount: true}}]}";
        let parsed = |cache_type: &str, account: Option<&PluginAccount>, password: &str| {
            let provider = config::parse(&text.replace("TYPE", cache_type))
                .unwrap()
                .remove(0);
            let auth = json!({ "auth": { "r.test": { "username": "u", "password": password } } });
            parse(&provider, account, response(&auth).to_string().as_bytes()).map(|all| all.scope)
        };
        let account = account();
        let why = parsed("ServiceAccount", Some(&account), "jwt-1").unwrap_err();
        assert!(why.contains("cacheType") && !why.contains("jwt-1"), "{why}");
        for accepted in [
            parsed("Token", Some(&account), "jwt-1"),
            parsed("ServiceAccount", Some(&account), "other"),
            parsed("ServiceAccount", None, "jwt-1"),
        ] {
            assert_eq!(accepted, Ok(CacheScope::Registry));
        }
    }

    proptest! {
        #[test]
        fn any_output_is_parsed_or_refused(output in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&provider(), None, &output);
        }
    }
}
