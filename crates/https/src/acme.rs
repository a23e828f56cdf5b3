//! Orders certificates from a CA by ACME (RFC 8555) and puts them into the TLS of QUIC and TCP.
//!
//! In: the table `[acme]`, the certificate of an earlier order, time. Out: certificates for new handshakes,
//! and events. Always holds: this runs on the slow thread, one order at a time; a failure leaves the
//! certificate in use; every wait for the CA is bounded; port 80 is open only while the CA looks there.

mod http_challenge;
mod http_client;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, CertificateIdentifier, ChallengeType, Identifier,
    NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use mpvpn_config::{Acme as AcmeConfig, AcmeChallenge, ServerConfig};
use mpvpn_error::RunError;
use mpvpn_identity::{
    acme::{AcmeStore, Failure, RenewalWindow, Schedule, certificate_request, tls_alpn_certificate},
    identity::Identity,
    random,
    tls::{self, LastRefusal, ServerCertificates},
    trust::Trust,
};
use mpvpn_os::tcp::{ListenOptions, Protocol, TcpAcceptor};
use mpvpn_status::events::{Event, EventSender};
use mpvpn_tcp::dial::first_ready;
use rustls::ClientConfig;
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};

use http_challenge::serve_http_challenges;
use http_client::{HttpClient, Unreached};

/// Time for a whole order. Longer: an order that hangs delays the next one. Shorter: fails at a CA that
/// validates slowly.
const ORDER_TIMEOUT: Duration = Duration::from_secs(300);
/// Time for the CA to validate the names, and again to issue the certificate.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// How often the CA is asked when it wants a certificate to be renewed (ARI, RFC 9773 §4.3.2: every six
/// hours). Rarer: a revocation is noticed late. Also the longest sleep, as the clock may be set meanwhile.
const ASK_INTERVAL: Duration = Duration::from_secs(6 * 3600);
/// The port at which a CA looks for the answer to HTTP-01 (RFC 8555 §8.3).
const HTTP_PORT: u16 = 80;
/// The error of a CA that does not know the account any more (RFC 8555 §6.7).
const NO_ACCOUNT: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// The orders of a server.
pub struct Acme {
    config: AcmeConfig,
    store: AcmeStore,
    schedule: Schedule,
    current: Option<Identity>,
    certificates: ServerCertificates,
    tls: Arc<ClientConfig>,
    last_refusal: LastRefusal,
    /// The addresses at which the server listens.
    addresses: BTreeSet<IpAddr>,
}

impl Acme {
    /// The orders of a server with the table `[acme]`. Reads the CAs that sign the directory's certificate.
    ///
    /// # Errors
    /// If there are no such CAs, or they cannot be read.
    pub fn of(config: &ServerConfig, certificates: &ServerCertificates) -> Result<Option<Self>, RunError> {
        let Some(acme) = &config.acme else { return Ok(None) };
        let trust = acme.ca.clone().map_or(Trust::System, Trust::Ca);
        let last_refusal = LastRefusal::default();
        let tls = tls::client_config_reporting(&trust, None, &[b"http/1.1"], &last_refusal)?;
        let store = AcmeStore::new(&config.state_dir, &acme.directory, &acme.domains);
        let current = store.certificate();
        let [fraction] = random::<1>().map_err(RunError::io("get random numbers"))?;
        Ok(Some(Self {
            schedule: Schedule::new(current.as_ref(), f64::from(fraction) / f64::from(u8::MAX)),
            config: acme.clone(),
            store,
            current,
            certificates: certificates.clone(),
            tls: Arc::new(tls),
            last_refusal,
            addresses: config.listen.iter().map(SocketAddr::ip).collect(),
        }))
    }

    /// Orders and renews until dropped.
    pub async fn run(mut self, events: EventSender) {
        loop {
            let wait = self.schedule.wait(SystemTime::now());
            if wait > Duration::ZERO {
                sleep(wait.min(ASK_INTERVAL)).await;
                if wait > ASK_INTERVAL {
                    self.ask_when_to_renew().await;
                }
                continue;
            }
            let ordered = timeout(ORDER_TIMEOUT, self.order()).await;
            let ordered = ordered.unwrap_or_else(|_| {
                Err(OrderError::refused(format!("the order took longer than {} s", ORDER_TIMEOUT.as_secs())))
            });
            match ordered {
                Ok(identity) => {
                    self.schedule.on_issued(&identity);
                    self.certificates.set_issued(Some(identity.clone()));
                    events.report(Event::CertificateIssued {
                        names: self.config.domains.clone(),
                        until: identity.valid_until().as_str().into(),
                    });
                    self.current = Some(identity);
                }
                Err(OrderError { reason, failure }) => {
                    let pause = self.schedule.on_failure(SystemTime::now(), failure);
                    events.report(Event::CertificateFailed {
                        reason: reason.as_str().into(),
                        retry_s: pause.as_secs(),
                        until: self.current.as_ref().map(|identity| identity.valid_until().as_str().into()),
                    });
                }
            }
        }
    }

    /// A new certificate.
    async fn order(&self) -> Result<Identity, OrderError> {
        let account = self.account().await?;
        let names: Vec<_> = self.config.domains.iter().cloned().map(Identifier::Dns).collect();
        let mut order = match account.new_order(&NewOrder::new(&names)).await {
            Err(instant_acme::Error::Api(problem)) if problem.r#type.as_deref() == Some(NO_ACCOUNT) => {
                self.new_account().await?.new_order(&NewOrder::new(&names)).await
            }
            order => order,
        }?;
        let answers = pending_challenges(&mut order, self.config.challenge).await?;
        let shown = self.show(&answers)?;
        let patience = RetryPolicy::new().timeout(STEP_TIMEOUT);
        let validated = async {
            set_ready(&mut order, self.config.challenge).await?;
            order.poll_ready(&patience).await
        };
        let state = tokio::select! {
            state = validated => state,
            () = shown.serve() => Err("the pages for the CA ended".into()),
        };
        drop(shown);
        if !matches!(state, Ok(OrderStatus::Ready)) {
            return Err(self.refusal(&mut order, state).await);
        }
        let (key, request) = certificate_request(&self.config.domains).map_err(OrderError::refused)?;
        order.finalize_csr(&request).await?;
        let chain = order.poll_certificate(&patience).await?;
        self.store.save_certificate(&key, &chain).map_err(OrderError::refused)
    }

    /// The account of an earlier order, else a new one.
    async fn account(&self) -> Result<Account, OrderError> {
        let kept =
            self.store.account().and_then(|json| serde_json::from_slice::<AccountCredentials>(&json).ok());
        match kept {
            Some(credentials) => Ok(self.builder().from_credentials(credentials).await?),
            None => self.new_account().await,
        }
    }

    async fn new_account(&self) -> Result<Account, OrderError> {
        let contact = self.config.email.as_ref().map(|email| format!("mailto:{email}"));
        let contact: Vec<&str> = contact.as_deref().into_iter().collect();
        // The table `[acme]` says that its author agrees.
        let new =
            NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
        let (account, credentials) = self.builder().create(&new, self.config.directory.clone(), None).await?;
        let json = serde_json::to_vec(&credentials).map_err(OrderError::refused)?;
        self.store.save_account(&json).map_err(OrderError::refused)?;
        Ok(account)
    }

    fn builder(&self) -> instant_acme::AccountBuilder {
        Account::builder_with_http(Box::new(HttpClient {
            tls: Arc::clone(&self.tls),
            last_refusal: self.last_refusal.clone(),
        }))
    }

    /// Asks the CA when it wants the certificate to be renewed. A CA need not say.
    async fn ask_when_to_renew(&mut self) {
        let Some(leaf) = self.current.as_ref().and_then(|identity| identity.certs().first()) else { return };
        let Ok(id) = CertificateIdentifier::try_from(leaf) else { return };
        let asked = async { Ok::<_, OrderError>(self.account().await?.renewal_info(&id).await?) };
        match timeout(ORDER_TIMEOUT, asked).await {
            Ok(Ok((info, _))) => {
                let window = info.suggested_window;
                self.schedule
                    .on_suggested(RenewalWindow { start: window.start.into(), end: window.end.into() });
            }
            Ok(Err(error)) => tracing::debug!(error = error.reason, "the CA does not say when to renew"),
            Err(_) => tracing::debug!("the CA does not answer when it is asked when to renew"),
        }
    }

    /// Shows the answers to challenges until dropped.
    fn show(&self, answers: &[Answer]) -> Result<Shown, OrderError> {
        let certificates = self.certificates.clone();
        let mut shown = Shown { certificates, listeners: Vec::new(), pages: BTreeMap::new() };
        match self.config.challenge {
            AcmeChallenge::TlsAlpn01 => {
                let certificate = |answer: &Answer| {
                    let made = tls_alpn_certificate(&answer.domain, &answer.digest);
                    made.map(|identity| (answer.domain.clone(), identity))
                };
                let made: Result<Vec<_>, _> = answers.iter().map(certificate).collect();
                self.certificates.set_challenges(made.map_err(OrderError::refused)?);
            }
            AcmeChallenge::Http01 if answers.is_empty() => {}
            AcmeChallenge::Http01 => {
                let page = |answer: &Answer| (answer.token.clone(), answer.key_authorization.clone());
                shown.pages = answers.iter().map(page).collect();
                shown.listeners = self.listen()?;
            }
        }
        Ok(shown)
    }

    /// Listens on port 80 of the server's addresses.
    fn listen(&self) -> Result<Vec<TcpListener>, OrderError> {
        let v6only = self.addresses.iter().any(IpAddr::is_ipv4);
        let listen = |ip: &IpAddr| {
            let options = ListenOptions { protocol: Protocol::Tcp, v6only };
            let listener = TcpAcceptor::listen(SocketAddr::new(*ip, HTTP_PORT), options).map_err(|error| {
                OrderError::refused(format!(
                    "{error}: http-01 needs port 80, which `ss -ltnp sport = :80` names the owner of; with TCP port 443 \
                     challenge = \"tls-alpn-01\" of [acme] needs no other"
                ))
            })?;
            TcpListener::from_std(listener.into()).map_err(OrderError::refused)
        };
        self.addresses.iter().map(listen).collect()
    }

    /// Why the CA did not find the order ready.
    async fn refusal(
        &self,
        order: &mut Order,
        state: Result<OrderStatus, instant_acme::Error>,
    ) -> OrderError {
        let mut reasons = Vec::new();
        let mut authorizations = order.authorizations();
        while let Some(Ok(mut authorization)) = authorizations.next().await {
            let Ok(now) = authorization.refresh().await else { continue };
            let name = now.identifier().to_string();
            let errors = now.challenges.iter().filter_map(|challenge| challenge.error.as_ref());
            reasons.extend(errors.map(|error| format!("{name}: {}", problem_text(error))));
        }
        if let Err(error) = state
            && reasons.is_empty()
        {
            return error.into();
        }
        let way = match self.config.challenge {
            AcmeChallenge::TlsAlpn01 => "TCP port 443",
            AcmeChallenge::Http01 => "TCP port 80",
        };
        let reasons = if reasons.is_empty() { "no reason".to_owned() } else { reasons.join("; ") };
        OrderError::refused(format!("the CA did not find this server at {way} of its names: {reasons}"))
    }
}

/// The answer to a challenge.
struct Answer {
    domain: String,
    token: String,
    key_authorization: String,
    digest: Vec<u8>,
}

/// Answers that are shown until this is dropped.
struct Shown {
    certificates: ServerCertificates,
    /// Port 80 of the server's addresses, for HTTP-01.
    listeners: Vec<TcpListener>,
    /// The page for each token.
    pages: BTreeMap<String, String>,
}

impl Shown {
    /// Serves the pages until dropped.
    async fn serve(&self) {
        let serve = |listener| Box::pin(serve_http_challenges(listener, self.pages.clone()));
        let mut all: Vec<_> = self.listeners.iter().map(serve).collect();
        if all.is_empty() { std::future::pending().await } else { first_ready(&mut all).await }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.certificates.set_challenges(Vec::new());
    }
}

fn challenge_type(challenge: AcmeChallenge) -> ChallengeType {
    match challenge {
        AcmeChallenge::TlsAlpn01 => ChallengeType::TlsAlpn01,
        AcmeChallenge::Http01 => ChallengeType::Http01,
    }
}

/// The answers for the names that the CA has not validated before.
async fn pending_challenges(order: &mut Order, challenge: AcmeChallenge) -> Result<Vec<Answer>, OrderError> {
    let mut answers = Vec::new();
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        if authorization.status == AuthorizationStatus::Valid {
            continue;
        }
        let Some(handle) = authorization.challenge(challenge_type(challenge)) else {
            return Err(OrderError::refused(format!("the CA does not offer the challenge {challenge}")));
        };
        let key_authorization = handle.key_authorization();
        answers.push(Answer {
            domain: handle.identifier().to_string(),
            token: handle.token.clone(),
            key_authorization: key_authorization.as_str().to_owned(),
            digest: key_authorization.digest().as_ref().to_vec(),
        });
    }
    Ok(answers)
}

/// Tells the CA that the answers are there.
async fn set_ready(order: &mut Order, challenge: AcmeChallenge) -> Result<(), instant_acme::Error> {
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        if authorization.status == AuthorizationStatus::Valid {
            continue;
        }
        if let Some(mut handle) = authorization.challenge(challenge_type(challenge)) {
            handle.set_ready().await?;
        }
    }
    Ok(())
}

/// Why there is no certificate.
#[derive(Debug)]
struct OrderError {
    reason: String,
    failure: Failure,
}

impl OrderError {
    fn refused(reason: impl std::fmt::Display) -> Self {
        Self { reason: reason.to_string(), failure: Failure::Refused }
    }
}

impl From<instant_acme::Error> for OrderError {
    fn from(error: instant_acme::Error) -> Self {
        match &error {
            instant_acme::Error::Api(problem) => Self::refused(problem_text(problem)),
            instant_acme::Error::Other(other) if other.is::<Unreached>() => {
                Self { reason: other.to_string(), failure: Failure::Unreached }
            }
            _ => Self::refused(format!("the CA's answer is not understood: {error}")),
        }
    }
}

fn problem_text(problem: &instant_acme::Problem) -> String {
    problem.detail.clone().or_else(|| problem.r#type.clone()).unwrap_or_else(|| "no reason".to_owned())
}
